"""Model sources: round trips of tiny models through every form that is read, and one clear line for each that is not."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sinkring.models.errors import ModelError, SourceError, UnsupportedModel
from sinkring.models.oracle import masked_dense_logits, streaming_logits
from sinkring.models.source import load_model, resolve_source
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from tests.models.tiny import tiny_llama
from tests.models.write_gguf import write_gguf

IDS = torch.arange(3, 23)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def add_tokenizer(folder: Path, chat_template: str | None) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(90))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    return model(IDS[None]).logits[0]


def assert_one_line(error: pytest.ExceptionInfo[ModelError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("tied", [False, True])
def test_folder_round_trip(tmp_path: Path, tied: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(tied=tied)
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    loaded = load_model(str(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert torch.equal(logits(loaded.model), logits(model.set_attn_implementation("eager") or model))
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.architecture == loaded.config.model_type == "llama"
    assert (loaded.tokenizer_json, loaded.chat_template, loaded.bos_id, loaded.stop_ids) == (None, None, 1, (2,))
    assert loaded.source == str(tmp_path)


def test_sharded_folder_round_trip(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert resolve_source(str(tmp_path)).files == (tmp_path / "config.json", *shards)
    assert torch.allclose(logits(load_model(str(tmp_path)).model), logits(model), atol=1e-5)
    shards[1].unlink()
    with pytest.raises(SourceError) as error:
        load_model(str(tmp_path))
    assert_one_line(error, f"1 of {len(shards)} weights files are missing", shards[1].name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_checkpoints_of_half_precision_are_read_exactly(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    model = tiny_llama().to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    loaded = load_model(str(tmp_path)).model.state_dict()
    for name, weight in model.state_dict().items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], weight.float())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("older_names", [False, True])
def test_the_text_decoder_of_a_model_that_also_sees(tmp_path: Path, older_names: bool) -> None:
    model = _seeing_gemma3()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if older_names:
        save_file({name.removeprefix("model."): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    loaded = load_model(str(tmp_path))
    assert (loaded.architecture, type(loaded.model).__name__) == ("gemma3_text", "Gemma3ForCausalLM")
    expected = model(input_ids=IDS[None]).logits[0]
    assert float((logits(loaded.model) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    # What is no part of the vision must not be left out.
    save_file({**load_file(file), "language_model.extra.weight": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(SourceError) as error:
        load_model(str(tmp_path))
    assert_one_line(error, "unexpected keys", "extra.weight")


def _seeing_gemma3() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 97, "sliding_window": 5}
    vision = {**sizes, "model_type": "siglip_vision_model", "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**text, "model_type": "gemma3_text", "max_position_embeddings": 256},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=94,
        eoi_token_index=95,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model.float().eval().requires_grad_(False)


def test_dtype(folder: Path) -> None:
    assert load_model(str(folder), dtype=torch.float64).model.dtype == torch.float64


def test_source_is_absolute_and_its_hash_is_that_of_the_content(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = resolve_source("model")
    assert source.name == str(folder)
    lines = "".join(f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in ("config.json", "model.safetensors"))
    before = source.sha256()
    assert before == hashlib.sha256(lines.encode()).hexdigest() == load_model("model").source_sha256
    (folder / "README.md").write_text("not part of the model")
    assert resolve_source("model").sha256() == before
    tiny_llama(seed=1).save_pretrained(folder)
    assert resolve_source("model").sha256() != before


def test_tokenizer_and_stops(folder: Path) -> None:
    add_tokenizer(folder, chat_template=None)
    plain = load_model(str(folder))
    assert plain.tokenizer_json is not None
    # Truncation, which the file has, is for training.
    assert Tokenizer.from_str(plain.tokenizer_json).encode("w0 w1 w2 w3 w4 w5").ids == [3, 4, 5, 6, 7, 8]
    assert (plain.chat_template, plain.bos_id, plain.stop_ids) == (None, 1, (2,))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    add_tokenizer(folder, template)
    chat = load_model(str(folder))
    assert chat.chat_template == template
    # <|im_end|> is id 94; <|eot_id|> is in the vocabulary, but the template never writes it.
    assert chat.stop_ids == (2, 94)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 7]}))
    assert load_model(str(folder)).stop_ids == (2, 7, 94)


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_round_trip(tmp_path: Path, tied: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model, path = tiny_llama(tied=tied), tmp_path / "tiny.gguf"
    if tied:
        state = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
        model.state_dict = lambda: state  # type: ignore[method-assign]
    write_gguf(path, model)
    capfd.readouterr()
    loaded = load_model(str(path))
    assert capfd.readouterr() == ("", "")
    assert torch.allclose(logits(loaded.model), logits(model), atol=1e-5)
    assert loaded.tokenizer_json is None
    assert loaded.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    # Nothing of the file's quantization hinders what is done with a model.
    assert loaded.model.double().float().dtype == torch.float32
    loaded.model.save_pretrained(tmp_path / "folder")
    assert torch.allclose(logits(load_model(str(tmp_path / "folder")).model), logits(model), atol=1e-5)


def test_gguf_that_is_cut_short_or_no_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", tiny_llama())
    whole = (tmp_path / "whole.gguf").read_bytes()
    for kept in (0, 3, 100, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(SourceError) as error:
            load_model(str(tmp_path / "cut.gguf"))
        assert_one_line(error, "cut.gguf: starts with" if kept < 4 else f"cut short, {kept} bytes", "copy it again")


def test_gguf_that_would_be_read_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, tiny_llama(), architecture="unheard-of")
    with pytest.raises(SourceError) as error:
        load_model(str(path))
    assert_one_line(error, "unheard-of")


def test_missing_and_wrong_kinds_of_source(tmp_path: Path) -> None:
    cases = [
        ("nowhere", ("nowhere: no such folder or file", "smollm2")),
        ("empty", ("has no config.json",)),
        ("config only", ("no weights", "model.safetensors")),
        ("pickled", ("pytorch_model.bin", "save_pretrained")),
        ("gguf inside", ("model.Q4.gguf: give the path of that file",)),
        ("model.pt", (".pt", "can run code")),
        ("model.safetensors", ("folder that also holds its config.json",)),
        ("model.onnx", (".onnx", "is not a model")),
    ]
    for name in ("empty", "config only", "pickled", "gguf inside"):
        (tmp_path / name).mkdir()
    for file in ("config only/config.json", "pickled/config.json", "pickled/pytorch_model.bin", "gguf inside/model.Q4.gguf"):
        (tmp_path / file).write_text("{}")
    for file in ("model.pt", "model.safetensors", "model.onnx"):
        (tmp_path / file).write_text("")
    for name, words in cases:
        with pytest.raises(SourceError) as error:
            load_model(str(tmp_path / name))
        assert_one_line(error, *words)


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/x", "a\0b", "y" * 300])
def test_a_name_that_can_be_no_path(name: str) -> None:
    with pytest.raises(SourceError) as error:
        load_model(name)
    assert_one_line(error, "is no path", "smollm2")
    assert len(str(error.value)) < 400


def test_damaged_folders(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()

    def refused(kind: type[ModelError], *words: str) -> None:
        with pytest.raises(kind) as error:
            load_model(str(folder))
        assert_one_line(error, str(folder), *words)

    (folder / "model.safetensors").write_bytes(weights[:-100])
    refused(SourceError, "cannot be read")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{")
    refused(SourceError, "cannot be read")
    # transformers would fill in random numbers, or leave weights unused, and go on.
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(SourceError, "missing keys", "model.layers.2.")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(SourceError, "unexpected keys", "model.layers.1.")
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    refused(SourceError, "mismatched keys", "mlp.", "(32, 64) in the file", "(32, 40) by the config")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    refused(UnsupportedModel, "gptq")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    refused(UnsupportedModel, "unheard-of", "never run")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(UnsupportedModel, "vit", "language-model head")


@pytest.mark.real_weights
def test_smollm2() -> None:
    loaded = load_model("smollm2")
    assert loaded.source == "smollm2"
    assert (loaded.architecture, loaded.bos_id, loaded.stop_ids) == ("llama", 1, (2,))
    assert loaded.chat_template is not None
    assert loaded.tokenizer_json is not None
    ids = torch.tensor(Tokenizer.from_str(loaded.tokenizer_json).encode("The capital of France is").ids)
    plain = loaded.model(ids[None]).logits[0]
    assert Tokenizer.from_str(loaded.tokenizer_json).decode([int(plain[-1].argmax())]).strip() == "Paris"
    # Logits reach about 40 here; float32 noise between the forms was 1e-4.
    assert float((masked_dense_logits(loaded.model, ids, 4, 252) - plain).abs().max()) < 1e-3
    assert float((streaming_logits(loaded.model, ids, 4, 252) - plain).abs().max()) < 1e-3
