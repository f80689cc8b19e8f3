"""Does a larger cache help? StreamingLLM's Table 6, in small: 4 sinks and caches of several sizes, all scored on the same tokens."""

import sys

from results import options
from same_tokens import measure, show

SINKS = 4


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--text", default="topics", help="(%(default)s)")
    parser.add_argument("--caches", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens, S + W")
    parser.add_argument("--starts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=2560, help="of each start (%(default)s)")
    args = parser.parse_args()
    caches = sorted(args.caches)
    rows = measure(args, [(SINKS, cache - SINKS) for cache in caches], reference=(SINKS, caches[-1] - SINKS))
    show(args, "cache-size", rows, f"S = {SINKS}", "cache S + W, tokens", caches, reference="the largest cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
