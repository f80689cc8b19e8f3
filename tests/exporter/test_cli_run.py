"""`sinkring run`, held to exact text by a model that says what it was told to: see `speaking_model.py`."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import IO, Any

import pytest
from sinkring.runtime import Manifest, open_bundle

from tests.exporter.invoke_cli import invoke, spawn
from tests.exporter.speaking_model import ANSWER, ROUND

LAP_TOKENS = len(ROUND.encode())
# What follows an "a", for ever.
FOLLOWING = ROUND[1:] + ROUND[0]


def test_a_prompt_is_continued_and_the_summary_goes_to_stderr(speaking_bundle: Path) -> None:
    # Seven laps of a ring of 14 slots.
    ended = invoke("run", speaking_bundle, "--prompt", "xa", "--tokens", 9 * LAP_TOKENS)
    assert (ended.status, ended.out) == (0, 9 * FOLLOWING + "\n")
    (summary,) = ended.err.splitlines()
    assert summary.startswith(f"position {2 + 9 * LAP_TOKENS}; generated {9 * LAP_TOKENS} (")
    assert "cache 8,192 bytes" in summary


def test_stdin_is_a_prompt_of_any_length(speaking_bundle: Path) -> None:
    # Also longer than the ring, and with characters of several bytes; the newline at its end is not part of it.
    prompt = 20 * "pröm→pt " + "a"
    ended = invoke("run", speaking_bundle, "--tokens", LAP_TOKENS, stdin=(prompt + "\n").encode())
    assert ended.out == FOLLOWING + "\n"
    assert f"read {len(prompt.encode())} " in ended.err


def test_json_is_one_object_with_the_figures(speaking_bundle: Path) -> None:
    ended = invoke("run", speaking_bundle, "--prompt", "xa", "--tokens", 2 * LAP_TOKENS, "--json")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("\n") == 1
    result = json.loads(ended.out)
    assert result["text"] == 2 * FOLLOWING
    assert (result["prompt_tokens"], result["generated_tokens"], result["position"]) == (2, 2 * LAP_TOKENS, 2 + 2 * LAP_TOKENS)
    assert result["cache_bytes"] == Manifest.read(speaking_bundle).cache_bytes
    assert result["tokens_per_second"] > 0
    assert (result["ended_by"], result["interrupted"]) == ("length", False)


def test_every_cut_gives_the_beginning_of_the_text(speaking_bundle: Path) -> None:
    raw = FOLLOWING.encode()
    for tokens in range(LAP_TOKENS + 1):
        out = invoke("run", speaking_bundle, "--prompt", "a", "--tokens", tokens).out
        # A character that was cut in two shows as U+FFFD, and only at the end.
        assert out == raw[:tokens].decode(errors="replace") + "\n"


def test_characters_arrive_whole(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 20 * LAP_TOKENS, bufsize=0)
    assert process.stdout is not None
    reads = []
    while piece := os.read(process.stdout.fileno(), 4096):
        # Fails if a read ends inside a character.
        reads.append(piece.decode("utf-8"))
    assert process.wait(60) == 0
    assert "".join(reads) == 20 * FOLLOWING + "\n"


def test_tokens_appear_as_they_come(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 10**9)
    assert process.stdout is not None
    try:
        # The answer has no end, so text before the end is text as it comes.
        assert process.stdout.read(len(FOLLOWING.encode())).decode() == FOLLOWING
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("stops", "text"),
    [(["🎈"], "é→"), (["дa"], "é→🎈"), (["zz", "→🎈"], "é"), (["é"], ""), (["aé→🎈дz"], 2 * FOLLOWING)],
)
def test_stop_strings_end_the_text_before_them(speaking_bundle: Path, stops: list[str], text: str) -> None:
    options = [word for stop in stops for word in ("--stop", stop)]
    result = json.loads(invoke("run", speaking_bundle, "--prompt", "a", "--tokens", 2 * LAP_TOKENS, *options, "--json").out)
    assert result["text"] == text
    assert result["ended_by"] == ("length" if text == 2 * FOLLOWING else "stop_text")


def chat_json(out: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The objects of the turns, and the last one, which counts them."""
    *turns, result = map(json.loads, out.splitlines())
    assert result["turns"] == len(turns)
    return turns, result


def test_chat_goes_on_by_ids_over_turns(speaking_bundle: Path) -> None:
    turns = ["Hello there", "", "und wie geht's? →🎈", "and so on, past the end of the ring"]
    ended = invoke("run", speaking_bundle, "--chat", stdin="\n".join(turns).encode())
    assert (ended.status, ended.out) == (0, 3 * f"{ANSWER}\n")


def test_a_chat_streams_the_very_ids_of_its_template(speaking_bundle: Path) -> None:
    turns, result = chat_json(invoke("run", speaking_bundle, "--chat", "--json", stdin=b"one\r\ntwo\n").out)
    assert [(turn["user"], turn["text"], turn["ended_by"]) for turn in turns] == [
        ("one", ANSWER, "stop_token"),
        ("two", ANSWER, "stop_token"),
    ]
    whole = "".join(f"\1user\n{user}\2\n\1assistant\n{ANSWER}\2" for user in ("one", "two"))
    # The newline between a stop token and the next turn is the template's: after the last answer it is still to come.
    assert result["position"] == len(whole.encode()) + 1


def test_an_answer_that_was_cut_is_closed_by_the_next_turn(speaking_bundle: Path) -> None:
    turns, cut = chat_json(invoke("run", speaking_bundle, "--chat", "--tokens", 3, "--json", stdin=b"one\ntwo\n").out)
    _, whole = chat_json(invoke("run", speaking_bundle, "--chat", "--tokens", 4, "--json", stdin=b"one\ntwo\n").out)
    # Either way the stream holds one end-of-turn token after each answer but a cut last one.
    assert [turn["ended_by"] for turn in turns] == ["length", "length"]
    assert cut["position"] == whole["position"] - 1
    stopped, _ = chat_json(invoke("run", speaking_bundle, "--chat", "--stop", "k", "--json", stdin=b"one\ntwo\n").out)
    assert [(turn["text"], turn["ended_by"]) for turn in stopped] == [("o", "stop_text"), ("o", "stop_text")]


def test_a_chat_without_turns_ends_well(speaking_bundle: Path) -> None:
    ended = invoke("run", speaking_bundle, "--chat", "--json")
    assert ended.status == 0
    assert json.loads(ended.out)["turns"] == 0


def test_each_turn_s_object_comes_as_it_ends_and_none_is_kept(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--chat", "--json", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(3):
        process.stdin.write(f"turn {number}\n".encode())
        process.stdin.flush()
        turn = json.loads(process.stdout.readline())
        assert (turn["user"], turn["text"], turn["ended_by"]) == (f"turn {number}", ANSWER, "stop_token")
        assert turn.keys() == {"user", "prompt_tokens", "text", "generated_tokens", "ended_by"}
    rest, _ = process.communicate(timeout=60)
    result = json.loads(rest)
    assert (process.returncode, result["turns"], result["interrupted"]) == (0, 3, False)
    assert "turn 0" not in rest.decode()


def test_a_prompt_alone_brings_no_begin_token_that_the_tokenizer_does_not_add(speaking_bundle: Path) -> None:
    assert Manifest.read(speaking_bundle).tokenizer.bos_id is not None  # type: ignore[union-attr]
    assert json.loads(invoke("run", speaking_bundle, "--prompt", "abc", "--tokens", 0, "--json").out)["position"] == 3


def test_sampling_follows_its_seed_and_options(speaking_bundle: Path) -> None:
    def sampled(*options: object) -> str:
        return json.loads(invoke("run", speaking_bundle, "--prompt", "a", "--tokens", 24, "--json", *options).out)["text"]

    hot = ["--temperature", 40, "--seed", 1]
    assert sampled(*hot) == sampled(*hot)
    assert sampled(*hot) != sampled("--temperature", 40, "--seed", 2)
    greedy = sampled()
    assert sampled(*hot) != greedy
    for filtered in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1.0]):
        assert sampled(*hot, *filtered) == greedy
    assert sampled("--repetition-penalty", 900) != greedy


def test_the_library_says_the_same(speaking_bundle: Path) -> None:
    with open_bundle(speaking_bundle, threads=1) as decoder, decoder.stream() as stream:
        stream.feed(list(b"a"))
        assert len(list(stream.generate(5))) == 5
    assert invoke("run", speaking_bundle, "--prompt", "a", "--tokens", 5, "--threads", 1).out == "é→\n"


def test_ctrl_c_ends_an_answer_with_its_summary(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 10**9)
    assert process.stdout is not None
    process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    (summary,) = stderr.decode().splitlines()
    assert summary.startswith("position ")


def test_ctrl_c_still_gives_the_json(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--chat", "--json", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    wait_until_taken(process.stdin)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
    turns, result = chat_json(stdout.decode())
    assert result["interrupted"]
    # Half a second is plenty for the answer, but a busy machine may be in the middle of it.
    assert ANSWER.startswith(turns[0]["text"])


def test_a_closed_pipe_ends_it_quietly(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 10**9)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_a_terminal_gets_a_live_line_and_is_left_as_it_was(speaking_bundle: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    # stdout is the same screen.
    options = {"stdout": theirs, "stderr": theirs, "env": {**os.environ, "TERM": "xterm"}}
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 1000 * LAP_TOKENS, **options)
    os.close(theirs)
    screen = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            screen += os.read(ours, 4096)
        except OSError:  # what Linux says when the other side has been closed
            break
    os.close(ours)
    assert process.wait(60) == 0
    text = screen.decode()
    live, back, summary = text.rpartition("\x1b8")
    assert re.search(r"\x1b\[24;1H\x1b\[2K\x1b\[7mposition [\d,]+   \d+\.\d tokens/s   cache 8,192 bytes\x1b\[0m\x1b8", text)
    # The last sequence gives the whole screen back to scrolling and clears the line.
    assert live.endswith("\x1b7\x1b[r\x1b[24;1H\x1b[2K")
    assert summary.startswith("position ")
    # And between the sequences stands the text, whole.
    written = re.sub(r"\x1bD\x1b\[A\x1b7\x1b\[1;23r\x1b8|\x1b7.*?\x1b8", "", (live + back).replace("\r\n", "\n"))
    assert written == 1000 * FOLLOWING + "\n"


def test_no_live_line_without_a_terminal(speaking_bundle: Path) -> None:
    process = spawn("run", speaking_bundle, "--prompt", "a", "--tokens", 500)
    _, stderr = process.communicate(timeout=60)
    assert b"\x1b" not in stderr
    assert stderr.count(b"\n") == 1


def wait_until_taken(pipe: IO[bytes]) -> None:
    """Until what was written to the pipe has been read."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder):
            return
        time.sleep(0.05)
    pytest.fail("the process never read its turn")


def test_metrics_are_served_while_it_runs(speaking_bundle: Path) -> None:
    ended = invoke("run", speaking_bundle, "--prompt", "a", "--tokens", 3, "--metrics-port", 0)
    assert ended.status == 0, ended.err
    assert "metrics at http://127.0.0.1:" in ended.err
