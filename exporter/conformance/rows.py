"""I4: a row equals a solo run, bit for bit, under random joins, pauses and resets of its neighbours. With one row: streams in turn."""

from dataclasses import dataclass, field

import numpy as np
from sinkring.exporter.conformance.findings import Check
from sinkring.exporter.conformance.subject import Logits, Subject, largest_difference, stream_on_row
from sinkring.runtime.decoder import Decoder
from sinkring.runtime.stream import Stream

SEED = 4


@dataclass
class Episode:
    """What one stream was given from its beginning on: calls are (start, stop) of its text; one token alone is a step."""

    row: int
    forward: bool
    calls: list[tuple[int, int]] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.calls[-1][1] if self.calls else 0


def check_rows(subject: Subject) -> Check:
    """Every logit of every stream of a random history against the same calls alone in a decoder of its own, and against the oracle."""
    turns = 400 if subject.full else 48
    with subject.open() as decoder:
        episodes = _random_history(subject, decoder, turns)
    worst, off, where = 0.0, 0.0, ""
    for done, episode in enumerate(episodes):
        subject.say("I4", turns + done, turns + len(episodes))
        together = np.stack(episode.logits)
        # A decoder of its own for each, so that nothing an earlier stream has left can be in both.
        with subject.open() as alone:
            solo = _replay(subject, alone, episode)
        difference = largest_difference(together, solo)
        if difference > worst:
            worst, where = difference, f"stream {done + 1}, on row {episode.row}"
        if episode.forward:
            for (_, stop), logits in zip(episode.calls, episode.logits, strict=True):
                off = max(off, subject.off(logits, stop - 1))
    subject.say("I4", 1, 1)
    oracle = f"{off:.2e} from the oracle, where {subject.tolerance:.2e} is allowed"
    return Check(
        "I4",
        f"{len(episodes)} streams in {turns} random joins, steps, pauses, resets and leaves on {subject.manifest.batch} rows, seed {SEED}",
        "max |Δlogit| to the solo runs",
        worst,
        0.0,
        worst == 0 and off <= subject.tolerance,
        f"{where}; {oracle}" if where else oracle,
    )


def _text(subject: Subject, episode: Episode) -> np.ndarray:
    # Streams of two texts, so that a neighbour's token in the wrong row cannot be the right one.
    return subject.ids if episode.forward else subject.ids[::-1]


def _random_history(subject: Subject, decoder: Decoder, turns: int) -> list[Episode]:
    rng = np.random.default_rng(SEED)
    tokens = len(subject.ids)
    lengths = (1, 2, max(1, subject.geometry.window_tokens // 2), min(subject.full_at, tokens - 2))
    live: dict[Stream, Episode] = {}
    episodes: list[Episode] = []

    def begin(stream: Stream) -> None:
        episode = Episode(stream.row, forward=len(episodes) % 2 == 0)
        # The first two start with a full ring: every step of the history then overwrites something.
        length = lengths[-1] if len(episodes) < 2 else lengths[int(rng.integers(len(lengths)))]
        live[stream] = episode
        episodes.append(episode)
        feed(stream, length)

    def feed(stream: Stream, length: int) -> None:
        episode = live[stream]
        start = episode.position
        episode.calls.append((start, start + length))
        episode.logits.append(stream.feed(_text(subject, episode)[start : start + length]))

    for turn in range(turns):
        subject.say("I4", turn, turns)
        for stream in [stream for stream, episode in live.items() if episode.position > tokens - 6]:
            stream.reset()
            begin(stream)
        draw = rng.random()
        chosen = list(live)[int(rng.integers(len(live)))] if live else None
        if chosen is None or (draw < 0.2 and len(live) < subject.manifest.batch):
            begin(decoder.stream())
        elif draw < 0.25:
            chosen.reset()
            begin(chosen)
        elif draw < 0.3:
            chosen.close()
            del live[chosen]
        elif draw < 0.4:
            feed(chosen, int(rng.integers(2, 6)))
        else:
            stepping = [stream for stream in live if stream is chosen or rng.random() < 0.6]
            stepped = decoder.step({stream: int(_text(subject, live[stream])[live[stream].position]) for stream in stepping})
            for stream in stepping:
                position = live[stream].position
                live[stream].calls.append((position, position + 1))
                live[stream].logits.append(stepped[stream])
    return episodes


def _replay(subject: Subject, decoder: Decoder, episode: Episode) -> Logits:
    text, logits = _text(subject, episode), []
    stream = stream_on_row(decoder, episode.row)
    for number, (start, stop) in enumerate(episode.calls):
        if stop - start == 1 and number:
            logits.append(decoder.step({stream: int(text[start])})[stream])
        else:
            logits.append(stream.feed(text[start:stop]))
    return np.stack(logits)
