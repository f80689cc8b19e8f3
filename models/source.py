"""Model sources: what a user may name as a model, and the files behind it.

A source is a Hugging Face folder (config.json and safetensors), a .gguf file, or a name of `fetch.KNOWN_WEIGHTS`. Nothing that needs
unpickling is opened: such a file can run code.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from sinkring.models.errors import ModelError, SourceError, UnsupportedModel
from sinkring.models.fetch import KNOWN_WEIGHTS, fetch_weights, file_sha256
from sinkring.models.gguf_file import check_all_read, gguf_read_once, inspect_gguf
from sinkring.models.gguf_settings import check_gguf_settings
from sinkring.models.modelopt import ModelOptWeights, PackedMatrix, multiply_inputs, read_algorithm, read_modelopt
from sinkring.models.quiet import quiet_transformers
from sinkring.models.refused import refuse_by_name
from sinkring.models.tokenizer import read_tokenizer
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, __version__

# Of a model that also reads images or sound: what its text decoder's weights are called in the checkpoint, and what else is in there.
_TEXT_PART: dict[str | None, tuple[dict[str, str], tuple[str, ...]]] = {
    "gemma3": ({r"^(?:model\.)?language_model\.(?:model\.)?": "model."}, ("vision_tower.", "multi_modal_projector."))
}

# Speech models whose text decoder is no class of AutoModelForCausalLM: the class, and the parts that are dropped once its weights are read.
_SPEECH: dict[str, tuple[str, tuple[str, ...]]] = {
    "kyutai_speech_to_text": ("KyutaiSpeechToTextForConditionalGeneration", ("codec_model",)),
    "voxtral_realtime": ("VoxtralRealtimeForConditionalGeneration", ("model.audio_tower", "model.multi_modal_projector")),
}

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Source:
    """name: as the user gave it, made absolute if it is a path; files: config (of a folder) and weights, in the order of their names."""

    name: str
    kind: Literal["folder", "gguf"]
    path: Path
    files: tuple[Path, ...]

    def sha256(self) -> str:
        """Of the file for a GGUF; for a folder, of the lines that `sha256sum config.json *.safetensors` prints for `files`."""
        if self.kind == "gguf":
            return file_sha256(self.path)
        lines = "".join(f"{file_sha256(file)}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be read: eval mode, without gradients, eager attention.

    tokenizer_json: text of a `tokenizers` JSON file, None if the source has no tokenizer. Its post-processor adds the BOS token if the
    model wants one: do not add bos_id a second time. stop_ids: tokens that end a text or a turn, ascending.
    source, source_sha256: see Source. packed: of a folder that ModelOpt exported, weights as they lie in it, by parameter name.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    architecture: str
    tokenizer_json: str | None
    chat_template: str | None
    bos_id: int | None
    stop_ids: tuple[int, ...]
    source: str
    source_sha256: str
    packed: dict[str, PackedMatrix] = field(default_factory=dict)


def resolve_source(source: str) -> Source:
    """Find the files of `source`, fetching a known name if need be. Raises SourceError."""
    if source in KNOWN_WEIGHTS:
        path = fetch_weights(KNOWN_WEIGHTS[source])
        return Source(source, "gguf", path, (path,))
    path = _find(source)
    if path.is_dir():
        return Source(str(path), "folder", path, _folder_files(path))
    if not path.exists():
        raise SourceError(
            f"{source}: no such folder or file; give a Hugging Face folder, a .gguf file, or one of the names: {', '.join(KNOWN_WEIGHTS)}"
        )
    if path.suffix == ".gguf":
        return Source(str(path), "gguf", path, (path,))
    if path.suffix in PICKLED:
        raise SourceError(f"{path}: a pickled checkpoint ({path.suffix}) can run code and is not read; {_TO_SAFETENSORS}")
    if path.suffix == ".safetensors":
        raise SourceError(f"{path}: is only the weights; give the folder that also holds its config.json: {path.parent}")
    raise SourceError(f"{path}: file type {path.suffix or 'without suffix'!r} is not a model; give a Hugging Face folder or a .gguf file")


def load_model(source: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load `source` (see `resolve_source`) with weights of `dtype`, GGUF ones dequantized.

    Raises SourceError for what is missing or damaged, UnsupportedModel for an architecture or a setting that would be read wrongly.
    """
    found = resolve_source(source)
    with quiet_transformers(), gguf_read_once():
        with _reading(found):
            gguf = inspect_gguf(found.path) if found.kind == "gguf" else None
        config = _read_config(found)
        if gguf is not None:
            check_gguf_settings(found.path, gguf.architecture, gguf.settings, config)
        packed = _read_packed(found)
        model = _read_weights(found, config, dtype, packed)
        if packed is not None:
            multiply_inputs(model, packed.input_factors)
        with _reading(found):
            if gguf is not None:
                check_all_read(found.path, gguf, model)
            tokenizer = read_tokenizer(found.path) if gguf is None or gguf.has_tokenizer else None
    generation = getattr(model, "generation_config", None)
    stops = set(tokenizer.stop_ids) if tokenizer else set()
    text = config.get_text_config()
    for eos in (text.eos_token_id, getattr(generation, "eos_token_id", None)):
        stops.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    bos = tokenizer.bos_id if tokenizer and tokenizer.bos_id is not None else text.bos_token_id
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        config=model.config,
        architecture=model.config.model_type,
        tokenizer_json=tokenizer.json if tokenizer else None,
        chat_template=tokenizer.chat_template if tokenizer else None,
        bos_id=bos,
        stop_ids=tuple(sorted(stops)),
        source=found.name,
        source_sha256=found.sha256(),
        packed=packed.packed if packed is not None else {},
    )


_TO_SAFETENSORS = "convert it with transformers: model.save_pretrained(folder) writes safetensors"


def _find(source: str) -> Path:
    """`source` as an absolute path, there or not. Raises SourceError for what can be no path at all."""
    try:
        path = Path(source).expanduser().absolute()
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:  # too long or no folder on the way; a NUL; the home of a user there is not
        shown = source if len(source) <= _LONGEST_SHOWN else f"{source[:_LONGEST_SHOWN]}... ({len(source)} characters)"
        raise SourceError(
            f"{shown!r}: is no path ({getattr(error, 'strerror', None) or error}); give a Hugging Face folder, a .gguf file, or one of the "
            f"names: {', '.join(KNOWN_WEIGHTS)}"
        ) from None
    return path


def _folder_files(folder: Path) -> tuple[Path, ...]:
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"it holds {ggufs[0]}: give the path of that file" if ggufs else "give the folder that holds the model's config.json"
        raise SourceError(f"{folder}: has no config.json; {hint}")
    if (folder / SAFETENSORS).is_file():
        return config, folder / SAFETENSORS
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{index}: is not an index of safetensors ({error}); copy the folder again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise SourceError(
                f"{folder}: {len(missing)} of {len(names)} weights files are missing, first {missing[0]}; copy the folder again"
            )
        return config, *(folder / name for name in names)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise SourceError(f"{folder}: its weights are a pickled checkpoint ({pickled[0]}), which can run code; {_TO_SAFETENSORS}")
    raise SourceError(f"{folder}: has a config.json but no weights; expected {SAFETENSORS} or {SAFETENSORS_INDEX} beside it")


def _where(source: Source) -> dict[str, Any]:
    if source.kind == "folder":
        return {"pretrained_model_name_or_path": source.path}
    return {"pretrained_model_name_or_path": source.path.parent, "gguf_file": source.path.name}


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Turn whatever transformers raises on a damaged or unknown source into one line: it raises almost every class there is."""
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise SourceError(f"{source.path}: a package to read it with is missing ({error}); pip install 'sinkring[export]'") from error
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{source.path}: cannot be read ({said}); copy it again, or give a model that transformers reads") from error


def _read_config(source: Source) -> PreTrainedConfig:
    """Of the text decoder, for a checkpoint that holds more."""
    with _reading(source):
        if source.kind == "folder":
            architecture = PreTrainedConfig.get_config_dict(source.path, local_files_only=True)[0].get("model_type")
            refuse_by_name(architecture)
            if architecture not in CONFIG_MAPPING:
                raise UnsupportedModel(
                    f"{source.path}: architecture {architecture!r} is unknown to transformers {__version__}, and code that comes with "
                    "a model is never run; give one of a known architecture, or install a transformers that knows it"
                )
        config = AutoConfig.from_pretrained(**_where(source), local_files_only=True, trust_remote_code=False)
    refuse_by_name(config.model_type)
    if config.model_type in _TEXT_PART:
        return config.get_text_config()
    if config.model_type not in _SPEECH and type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"{source.path}: architecture {config.model_type!r} is no decoder with a language-model head; give one that is"
        )
    if source.kind == "folder" and read_algorithm(source.path) is not None:
        # Its weights are read here, and transformers is given them as plain ones.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config
    if source.kind == "folder" and (quantized := getattr(config, "quantization_config", None)):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UnsupportedModel(f"{source.path}: weights are quantized ({method}); give the unquantized model, or a .gguf file of it")
    return config


def _read_packed(source: Source) -> ModelOptWeights | None:
    algorithm = read_algorithm(source.path) if source.kind == "folder" else None
    if algorithm is None:
        return None
    with _reading(source):
        return read_modelopt(source.files[1:], algorithm)


def _read_weights(source: Source, config: PreTrainedConfig, dtype: torch.dtype, packed: ModelOptWeights | None) -> PreTrainedModel:
    names, others = _text_part(source)
    speech, unused = _SPEECH.get(config.model_type, ("", ()))
    where = _where(source) if packed is None else {"pretrained_model_name_or_path": None, "state_dict": packed.state}
    # The class itself takes a state in place of a path.
    kind: Any = AutoModelForCausalLM if packed is None else AutoModelForCausalLM._model_mapping[type(config)]
    with _reading(source):
        loaded: Any = (getattr(transformers, speech) if speech else kind).from_pretrained(
            **where,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=source.kind == "folder" if packed is None else None,
            # Only so that they are listed below, with both shapes, rather than in a table that is printed.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            key_mapping=names or None,
        )
    model: PreTrainedModel = loaded[0]
    # transformers fills missing weights with random numbers and drops unexpected ones, with no more than a warning.
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        faulty = sorted(_describe(key) for key in loaded[1].get(fault) or ())
        if fault == "unexpected_keys" and others:
            faulty = [name for name in faulty if not name.removeprefix("model.").startswith(others)]
        if faulty:
            raise SourceError(
                f"{source.path}: weights and config disagree, {fault.replace('_', ' ')}: {len(faulty)}, first {faulty[0]}; "
                "copy the source again, or give one that is complete"
            )
    for part in unused:
        owner, _, name = part.rpartition(".")
        setattr(model.get_submodule(owner), name, None)
    if source.kind == "gguf":
        # The weights are plain tensors now; left marked as quantized, the model could be neither cast nor saved.
        loaded[0].hf_quantizer.remove_quantization_config(model)
        model.config._is_quantized = False
    return model


def _text_part(source: Source) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names in the checkpoint by those of the text decoder, and what the names of the rest begin with."""
    if source.kind == "gguf":
        return {}, ()
    kind = PreTrainedConfig.get_config_dict(source.path, local_files_only=True)[0].get("model_type")
    return _TEXT_PART.get(kind, ({}, ()))


def _describe(fault: str | tuple[str, torch.Size, torch.Size]) -> str:
    """A weight's name, or for a mismatch (name, shape in the file, shape by the config)."""
    if isinstance(fault, str):
        return fault
    name, in_file, by_config = fault
    return f"{name} (shape {tuple(in_file)} in the file, {tuple(by_config)} by the config)"
