"""How many sinks does a model need? StreamingLLM's Table 2, in small: caches of one size with 0, 1, 2, 4 and 8 sinks."""

import sys

from results import options
from same_tokens import measure, show

SINKS = (0, 1, 2, 4, 8)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--text", default="topics", help="(%(default)s)")
    parser.add_argument("--cache", type=int, default=256, help="tokens, S + W (%(default)s)")
    parser.add_argument("--starts", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=768, help="of each start (%(default)s)")
    args = parser.parse_args()
    rows = measure(args, [(sinks, args.cache - sinks) for sinks in SINKS], reference=(4, args.cache - 4))
    show(args, "sinks", rows, f"S + W = {args.cache}", "sinks S", SINKS, reference="4 sinks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
