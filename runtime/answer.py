"""One answer as text: tokens from a stream, turned into whole characters, up to a stop token, a stop string or a length."""

from collections.abc import Iterator, Sequence
from typing import Literal

from sinkring.runtime.metering import Meter
from sinkring.runtime.sampling import SamplingOptions
from sinkring.runtime.stream import Stream
from sinkring.runtime.text import IncrementalDecoder, StopMatcher, TextCodec

EndedBy = Literal["stop_token", "stop_text", "length"]


class Answer:
    """Iterate over it for the pieces of text, each as soon as it is certain ("" while nothing is). Once only.

    tokens: generated so far, without a stop token. ended_by is set when the iteration has ended: "stop_token" means that the stream holds
    that token, so the next `TextCodec.chat_turn` takes end_fed=True; "stop_text" that `stop_text` was reached, which is left out of the
    text but whose tokens are in the stream; "length" that max_tokens were generated.

    Raises InputError as `Stream.generate` does, and for an empty stop string.
    """

    def __init__(
        self,
        stream: Stream,
        codec: TextCodec,
        max_tokens: int,
        sampling: SamplingOptions,
        stops: Sequence[str] = (),
        meter: Meter | None = None,
    ) -> None:
        self.tokens = 0
        self.ended_by: EndedBy | None = None
        self.stop_text: str | None = None
        self._stream = stream
        self._text, self._stop = IncrementalDecoder(codec), StopMatcher(stops)
        self._ids = (meter or Meter()).count(
            stream.generate(
                max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                seed=sampling.seed,
            )
        )

    def __iter__(self) -> Iterator[str]:
        began = self._stream.position
        for token in self._ids:
            self.tokens += 1
            yield self._stop.push(self._text.push(token))
            if self._stop.matched is not None:
                break
        else:
            yield self._stop.push(self._text.flush())
            yield self._stop.flush()
        self.stop_text = self._stop.matched
        if self.stop_text is not None:
            self.ended_by = "stop_text"
        else:
            # The stop token is not among the tokens that come out, but the stream holds it.
            self.ended_by = "stop_token" if self._stream.position > began + self.tokens else "length"
