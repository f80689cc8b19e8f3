"""What a user can do wrong: one line on stderr that says what and where, exit status 2, no traceback, nothing half-written left behind."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from sinkring.exporter.cli_faults import needs_extra, one_line_faults
from sinkring.runtime.errors import DependencyError
from sinkring.runtime.manifest import MANIFEST_NAME
from transformers import GPT2Config, GPT2LMHeadModel

from tests.exporter.invoke_cli import Ended, invoke, spawn
from tests.exporter.speaking_model import save_speaking_model


def refused(*arguments: object, stdin: bytes = b"") -> str:
    """The one line that the command ends with. Its stdout must be empty."""
    ended = invoke(*arguments, stdin=stdin)
    assert ended.out == ""
    return only_error(ended)


def only_error(ended: Ended) -> str:
    """The error, which must be the last line and the only one, but for the stages that an export names as it goes."""
    lines = ended.err.splitlines()
    assert ended.status == 2, ended.err
    assert "Traceback" not in ended.err
    assert ended.errors == lines[-1:]
    assert all(line.startswith(("loading ", "tracing ", "writing ")) for line in lines[:-1])
    return ended.errors[0].removeprefix("error: ")


def changed(bundle: Path, tmp_path: Path, change: Callable[[Path, dict], None]) -> Path:
    """A copy of the bundle after `change(folder, manifest)`, the manifest written back."""
    copy = tmp_path / "changed"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    change(copy, manifest)
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("command", [["run"], ["run", "--chat"], ["inspect"], ["build"], ["validate"]], ids=" ".join)
def test_a_bundle_that_is_not_there(command: list[str], tmp_path: Path) -> None:
    assert refused(*command, tmp_path / "none", stdin=b"a").startswith(f"{tmp_path / 'none'}: no such bundle folder; make one with")
    assert "is not a sinkring bundle" in refused(*command, tmp_path, stdin=b"a")


def test_export_leaves_what_is_there_alone(speaking_model: Path, speaking_bundle: Path, tmp_path: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in speaking_bundle.iterdir())
    assert refused("export", speaking_model, "--out", speaking_bundle).endswith(
        "is already a bundle; give another --out, or --overwrite to replace it and the engines in it"
    )
    assert sorted((path.name, path.stat().st_mtime_ns) for path in speaking_bundle.iterdir()) == before
    (tmp_path / "mine.txt").write_text("mine")
    assert "exists and is not a sinkring bundle" in refused("export", speaking_model, "--out", tmp_path)
    assert "is a file, not a folder" in refused("export", speaking_model, "--out", tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_architecture_that_cannot_stream_is_named_with_the_reason(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)).save_pretrained(tmp_path / "gpt2")
    message = refused("export", tmp_path / "gpt2", "--out", tmp_path / "bundle")
    assert "'gpt2'" in message
    assert "its positions are learned" in message
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("missing", ["none", "none.gguf", "org/name"])
def test_a_model_that_is_not_there(missing: str, tmp_path: Path) -> None:
    message = refused("export", missing, "--out", tmp_path / "bundle")
    assert missing in message
    assert "no such folder or file" in message


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--window", 0, "window=0: must be 1 or more"),
        ("--window", -3, "window=-3"),
        ("--window", 10**6, "the model was trained for"),
        ("--sinks", -1, "sinks=-1: must be 0 or more"),
        ("--sinks", 10**6, "the model was trained for"),
        ("--chunk", 0, "chunk=0: must be 1 or more"),
        ("--slack", -1, "slack=-1: must be 0 or more"),
        ("--batch", 0, "batch=0: must be 1 or more"),
        ("--policy", "fast", "policy 'fast' is not known; use one of native, streaming"),
        ("--dtype", "fp7", "dtype 'fp7' is not supported; use one of fp32"),
        ("--cache-dtype", "fp7", "cache_dtype 'fp7' is not supported; use one of fp32, fp16"),
        ("--batch", 2**40, "bytes of memory; use a smaller batch or window"),
        ("--out", "", "out='' is empty: give the path"),
        ("--out", "x" * 5000, "a name of 5000 bytes"),
    ],
)
def test_export_options_that_make_no_sense(option: str, value: object, words: str, speaking_model: Path, tmp_path: Path) -> None:
    assert words in refused("export", speaking_model, "--out", tmp_path / "bundle", option, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "capacity=32 with policy streaming, whose streams have no end: use policy native"),
        (["--policy", "native", "--sinks", 4], "leave out sinks or capacity"),
        (["--policy", "native", "--window", 256], "leave out window or capacity"),
        (["--policy", "native", "--chunk", 8, "--slack", 2], "leave out slack"),
        (["--policy", "native"], "chunk=64 is more than capacity=32"),
    ],
)
def test_capacity_does_not_go_with_a_ring(options: list[object], words: str, speaking_model: Path, tmp_path: Path) -> None:
    assert words in refused("export", speaking_model, "--out", tmp_path / "bundle", "--capacity", 32, *options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "--prompt", "a"], ["inspect"], ["build"], ["validate"]], ids=lambda command: command[0])
def test_a_damaged_file_is_named_with_both_hashes(command: list[str], speaking_bundle: Path, tmp_path: Path) -> None:
    def flip_a_bit(folder: Path, manifest: dict) -> None:
        weights = bytearray((folder / "weights.bin").read_bytes())
        weights[1000] ^= 1
        (folder / "weights.bin").write_bytes(weights)

    message = refused(*command, changed(speaking_bundle, tmp_path, flip_a_bit))
    assert "weights.bin" in message
    assert "sha256" in message
    assert "export again" in message


def test_a_manifest_of_another_version(speaking_bundle: Path, tmp_path: Path) -> None:
    message = refused("run", changed(speaking_bundle, tmp_path, lambda _, manifest: manifest.update(format_version=99)), "--prompt", "a")
    assert "format version is 99, this sinkring reads 1" in message


def test_a_manifest_that_is_no_json(speaking_bundle: Path, tmp_path: Path) -> None:
    bundle = changed(speaking_bundle, tmp_path, lambda *_: None)
    (bundle / MANIFEST_NAME).write_text("{\n\n]")
    assert "not valid JSON" in refused("inspect", bundle)


def test_a_file_that_is_missing(speaking_bundle: Path, tmp_path: Path) -> None:
    bundle = changed(speaking_bundle, tmp_path, lambda folder, _: (folder / "decode.heads.onnx").unlink())
    assert "decode.heads.onnx" in refused("inspect", bundle)


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_prompt(stdin: bytes, speaking_bundle: Path) -> None:
    assert "the prompt is empty" in refused("run", speaking_bundle, stdin=stdin)
    assert "the prompt is empty" in refused("run", speaking_bundle, "--prompt", "")


@pytest.mark.parametrize("mode", [[], ["--chat"]])
def test_stdin_that_is_no_text(mode: list[str], speaking_bundle: Path) -> None:
    message = refused("run", speaking_bundle, *mode, stdin=b"abc\xff\n")
    assert message == "stdin is not UTF-8 text (byte 3 is 0xff); convert it, with iconv for example"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "onnx"], "backend 'onnx' is not known; use onnxruntime"),
        (["--threads", 0], "threads=0: must be"),
        (["--threads", 100000], "threads=100000: must be a whole number, 1 to "),
        (["--stop", "a\udcfe"], "--stop is not UTF-8 text (character 1 is byte 0xfe)"),
        (["--tokens", -1], "tokens=-1: must be 0 or more"),
        (["--temperature", -1], "temperature=-1.0: must be 0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-k", -1], "top_k=-1: must be 0"),
        (["--top-p", 0], "top_p=0.0: must be above 0"),
        (["--min-p", 2], "min_p=2.0: must be 0"),
        (["--repetition-penalty", 0], "repetition_penalty=0.0: must be"),
        (["--seed", -1], "seed=-1: must be 0 or more"),
        (["--stop", ""], 'stop string "" is empty'),
        (["--chat"], "--prompt and --chat are given"),
    ],
)
def test_run_options_that_make_no_sense(options: list[object], words: str, speaking_bundle: Path) -> None:
    assert words in refused("run", speaking_bundle, "--prompt", "a", *options)


def test_a_prompt_that_is_no_text(speaking_bundle: Path) -> None:
    message = refused("run", speaking_bundle, "--prompt", os.fsdecode(b"a\xff"))
    assert message == "--prompt is not UTF-8 text (character 1 is byte 0xff); convert it, with iconv for example"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["doctor"], 0), (["run", "--prompt", "x", "--tokens", 3], 0), (["run", "--tokens", 3], 2), (["run", "--chat"], 0)],
    ids=["doctor", "prompt", "stdin", "chat"],
)
def test_a_standard_stream_that_is_closed(arguments: list[object], status: int, closed: tuple[int, ...], speaking_bundle: Path) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    bundle = [] if arguments == ["doctor"] else [speaking_bundle]
    process = spawn(*arguments, *bundle, preexec_fn=close)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err.decode()
    assert b"Traceback" not in err
    assert b"Traceback" not in out


def test_a_bundle_without_text(speaking_bundle: Path, tmp_path: Path) -> None:
    bundle = changed(speaking_bundle, tmp_path, lambda _, manifest: manifest["tokenizer"].update(chat_template=None))
    assert "no chat template" in refused("run", bundle, "--chat", stdin=b"hello\n")
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    (bundle / MANIFEST_NAME).write_text(json.dumps({**manifest, "tokenizer": None}))
    assert "has no tokenizer" in refused("run", bundle, "--prompt", "a")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "tensor"], "target 'tensor'"),
        (["--sm", "89,x"], "--sm '89,x': 'x' is not a compute capability"),
        (["--sm", "12"], "sm=12"),
    ],
)
def test_build_options_that_make_no_sense(options: list[str], words: str, speaking_bundle: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    assert words in refused("build", speaking_bundle, *options)


def test_validate_wants_steps_and_the_model_it_came_from(speaking_bundle: Path, tmp_path: Path) -> None:
    assert "steps=0: must be 1 or more" in refused("validate", speaking_bundle, "--steps", 0)
    assert "no decode graph for target 'jetson', only for ['onnxruntime'" in refused("validate", speaking_bundle, "--target", "jetson")
    save_speaking_model(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text((tmp_path / "other" / "config.json").read_text() + "\n")
    message = refused("validate", speaking_bundle, "--steps", 4, "--model", tmp_path / "other")
    assert "sha256" in message


def test_a_disk_that_is_full_while_exporting(speaking_model: Path, tmp_path: Path) -> None:
    # A limit on the size of files stands in for the full disk: the write fails just so, with another number.
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))

    process = spawn("export", speaking_model, "--out", tmp_path / "bundle", preexec_fn=limit)
    out, err = process.communicate(timeout=300)
    message = only_error(Ended(process.returncode, out.decode(), err.decode()))
    assert os.strerror(errno.EFBIG) in message
    assert "nothing was left there" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["run", "--prompt", "a"], ["run", "--prompt", "a", "--json"], ["inspect"], ["inspect", "--json"]])
def test_an_output_that_is_full(options: list[str], speaking_bundle: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = spawn(*options, speaking_bundle, stdout=full)
        _, err = process.communicate(timeout=60)
    lines = err.decode().splitlines()
    assert lines[-1] == f"error: {os.strerror(errno.ENOSPC)}"
    # Before it stands no more than the summary of a run that had come to its end.
    assert all(line.startswith("position ") for line in lines[:-1])
    assert process.returncode == 2


@pytest.mark.parametrize(
    "arguments", [["run"], ["export", "x"], ["inspect", "x", "--nonsense"], ["nonsense"], ["run", "x", "--tokens", "many"]], ids=" ".join
)
def test_wrong_usage_has_status_2_and_no_traceback(arguments: list[str]) -> None:
    ended = invoke(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert "Error: " in ended.err


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(DependencyError, match=r"^sinkring export needs the package no_such_package: pip install 'sinkring\[export\]'$"):  # noqa: SIM117 - the order matters
        with needs_extra("export", "export"):
            import_module("no_such_package")


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_faults():
        raise DependencyError("first\n  second")
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: first second\n")


def test_our_own_bugs_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), one_line_faults():
        _ = 1 // 0


def test_an_interrupt_has_the_shell_s_status() -> None:
    with pytest.raises(SystemExit) as ended, one_line_faults():
        raise KeyboardInterrupt
    assert ended.value.code == 130


def test_a_device_that_is_not_here(speaking_bundle: Path) -> None:
    assert "device='tpu': must be 'cpu' or 'cuda'" in refused("run", speaking_bundle, "--prompt", "a", "--device", "tpu")
    assert "CUDAExecutionProvider" in refused("run", speaking_bundle, "--prompt", "a", "--device", "cuda")
