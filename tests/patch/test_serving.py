"""Serving inside Transformers: continuous batching is refused without a trace, and a server answers sparsely."""

import asyncio
import copy
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState
from transformers.utils import import_utils
from typer.main import get_command

from hf_sparse_attn import patch_model, serve_model, sparse_attention, sparse_attention_stats, unpatch_model
from hf_sparse_attn.cli.app import app
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.patch.serving import SERVER_OPTIONS, serve_only
from hf_sparse_attn.patched import is_patched
from tests.models import make_model, random_ids
from tests.tiny import save_model

PROMPTS = [random_ids(1, 150).tolist()[0], random_ids(1, 70, seed=2).tolist()[0]]
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
REFUSED = r"continuous batching .* all keys and values .* no metadata .* docs/serving.md.* call generate\(\)"
NAME = "sparse/tiny"
CHAT = "The day is long. The wind is low. Out and home again. " * 6


def batching(model, **options):
    """Generate with continuous batching, and return the new tokens of each prompt."""
    pool = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=512)
    config = GenerationConfig(**GREEDY)
    outputs = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=pool, **options)
    return [output.generated_tokens for output in outputs.values()]


def generated(model, prompt):
    inputs = torch.tensor([prompt], device=model.device)
    # Not compiled: float64 takes the ops' references, which a CUDA graph cannot record.
    return model.generate(inputs, **GREEDY, disable_compile=True)[0, len(prompt) :].tolist()


@pytest.fixture
def model(exact):
    return make_model("llama", dtype=torch.float64)


def test_refused_batching_names_what_is_missing_and_leaves_nothing_behind(model):
    patch_model(model, "quest", token_budget=48)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    attributes, implementation = dict(model.__dict__), model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=4)  # without eos_token_id, which Transformers would set to -1
    given = copy.deepcopy(config).to_dict()
    with pytest.raises(ValueError, match=REFUSED):
        model.generate_batch(PROMPTS, generation_config=config)
    with pytest.raises(ValueError, match=REFUSED):
        model.init_continuous_batching(generation_config=config)
    with pytest.raises(ValueError, match=REFUSED), model.continuous_batching_context_manager(config):
        pass
    with pytest.raises(ValueError, match="not supported"):  # Transformers' own method, past the refusal
        type(model).init_continuous_batching(model, generation_config=GenerationConfig(**GREEDY))
    assert config.to_dict() == given
    assert model.__dict__ == attributes
    assert model.config._attn_implementation == implementation
    assert [generated(model, prompt) for prompt in PROMPTS] == expected


def test_a_manager_older_than_the_patch_fails_its_requests(model):
    dense = batching(model)
    config = GenerationConfig(**GREEDY)
    pool = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=512)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=pool)
    patch_model(model, "quest", token_budget=48)
    manager.start()
    try:
        manager.add_request(PROMPTS[0])
        result = manager.get_result(timeout=60)
    finally:
        manager.stop(block=True)
    assert result.generated_tokens == []
    assert "is not supported by a patched model" in result.error
    patch_model(model, "quest", token_budget=48)  # stopping may have switched the attention implementation
    generated(model, PROMPTS[0])
    assert sparse_attention_stats(model).kv_fraction < 1
    unpatch_model(model)
    model.set_attn_implementation("sdpa")
    assert batching(model) == dense == [generated(model, prompt) for prompt in PROMPTS]


def test_a_kept_manager_waits_until_the_model_is_unpatched(model):
    dense = batching(model, persistent_manager=True)
    with sparse_attention(model, "quest", token_budget=48), pytest.raises(ValueError, match=REFUSED):
        batching(model)
    assert batching(model) == dense


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture
def served(folder):
    """A patched model in float64, its tokenizer, and Transformers' own manager of models, which serves it alone."""
    model, tokenizer = load_model(folder, torch.float64, "cpu")
    patch_model(model, "quest", token_budget=48, dense_layers=1)
    manager = ModelManager(device="cpu")
    serve_only(manager, model, tokenizer, NAME)
    return SimpleNamespace(model=model, tokenizer=tokenizer, manager=manager)


def test_the_server_generates_with_the_patched_model(served):
    chat = [{"role": "user", "content": CHAT}]
    inputs = served.tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    config = GenerationConfig(**{**GREEDY, "max_new_tokens": 8})
    expected = served.model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :]
    sparse = sparse_attention_stats(served.model)
    assert sparse.kv_fraction < 1
    with sparse_attention(served.model, "full"):
        dense = served.model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :]
    assert not torch.equal(dense, expected)  # so a dense server would be noticed

    async def requests():
        manager = GenerateManager()
        model, tokenizer = served.manager.load_model_and_processor(served.manager.process_model_name(NAME))
        text, _, tokens = await manager.generate_non_streaming(model, tokenizer, inputs, config, "a")
        queue, _ = manager.generate_streaming(model, tokenizer, inputs, config, "b")
        streamed = []
        while (piece := await asyncio.wait_for(queue.get(), 60)) is not None:
            assert isinstance(piece, str), piece.msg
            streamed.append(piece)
        return text, tokens, "".join(streamed)

    text, tokens, streamed = asyncio.run(requests())
    assert torch.equal(tokens, expected)
    assert text.startswith(streamed)  # the stream leaves out bytes that are no character yet
    assert sparse_attention_stats(served.model).kv_bytes == sparse.kv_bytes


def test_the_server_has_no_other_model(served, monkeypatch):
    class HTTPException(Exception):  # noqa: N818, FastAPI's name
        def __init__(self, status_code, detail):
            super().__init__(status_code, detail)

    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=HTTPException))
    handler = BaseHandler(served.manager, GenerationState())
    for body in ({}, {"model": NAME}):
        assert handler._resolve_model(body)[1:] == (served.model, served.tokenizer)
    with pytest.raises(HTTPException, match="pinned to 'sparse/tiny'"):
        handler._resolve_model({"model": "other"})
    with pytest.raises(ValueError, match=r"serves 'sparse/tiny' alone; model='other'"):
        served.manager.load_model_and_processor("other@main")
    assert [listed["id"] for listed in served.manager.get_gen_models()] == [NAME]


def test_a_reset_server_serves_the_same_patched_model(served):
    served.manager.shutdown()  # POST /reset
    assert served.manager.load_model_and_processor(f"{NAME}@main")[0] is served.model

    async def events():
        return [event async for event in served.manager.load_model_streaming(f"{NAME}@main")]

    (event,) = asyncio.run(events())  # POST /load_model, as `transformers chat` sends it
    assert '"status": "ready"' in event


def test_a_served_model_that_was_unpatched_is_not_served(served):
    unpatch_model(served.model)
    with pytest.raises(ValueError, match="is not patched"):
        served.manager.load_model_and_processor(f"{NAME}@main")


class FakeServe:
    """Transformers' Serve without the packages of a server."""

    def __init__(self, non_blocking, **options):
        self._model_manager, self.options = ModelManager(device="cpu"), options
        self.server = SimpleNamespace(run=lambda: RAN.append(self))
        assert non_blocking
        self.start_server()

    def start_server(self):
        raise AssertionError("started before the model was in place")


RAN = []


@pytest.mark.parametrize(("name", "expected"), [("sparse/tiny", "sparse/tiny"), (None, "folder")])
def test_the_model_is_in_place_before_the_server_runs(name, expected, folder, monkeypatch):
    monkeypatch.setattr("transformers.cli.serve.Serve", FakeServe)
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    RAN.clear()
    model, tokenizer = load_model(folder, None, "cpu")
    patch_model(model, "quest", token_budget=48)
    serve_model(model, tokenizer, name, port=8123, compile=True)
    (server,) = RAN
    assert server.options == {"port": 8123, "compile": True}
    manager = server._model_manager
    assert manager.force_model == (str(folder) if expected == "folder" else expected)
    assert manager.load_model_and_processor(f"{manager.force_model}@main") == (model, tokenizer)


def test_what_cannot_be_served_is_refused(model, monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    with pytest.raises(ValueError, match="is not patched"):
        serve_model(model, None, NAME)
    patch_model(model, "quest")
    with pytest.raises(ValueError, match=REFUSED):
        serve_model(model, None, NAME, continuous_batching=True)
    for option in ("force_model", "attn_implementation", "prot"):
        with pytest.raises(TypeError, match=rf"no option '{option}'; allowed: host, port"):
            serve_model(model, None, NAME, **{option: "x"})
    with pytest.raises(ValueError, match="name is empty"):
        serve_model(model, None)
    with pytest.raises(ImportError, match=r"pip install 'transformers\[serving\]'"):
        serve_model(model, None, NAME)


def test_the_page_about_serving(folder, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    calls = []
    monkeypatch.setattr("hf_sparse_attn.serve_model", lambda *args, **options: calls.append((*args, options)))
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(code.replace("Qwen/Qwen2.5-7B-Instruct", str(folder)), {})
    ((model, _, name, options),) = calls
    assert is_patched(model)
    assert (name, set(options) <= set(SERVER_OPTIONS)) == ("qwen", True)
    (command,) = re.findall(r"^hf-sparse-attn serve .*$", page, re.MULTILINE)
    known = {option for parameter in get_command(app).commands["serve"].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", command)) <= known
    listed = page.partition("do not choose or load models: ")[2].partition(". ")[0]
    assert tuple(re.findall("`([a-z_]+)`", listed)) == SERVER_OPTIONS


def test_transformers_serve_has_what_serve_model_uses():
    parameters = inspect.signature(Serve.__init__).parameters
    assert {*SERVER_OPTIONS, "non_blocking"} <= set(parameters)
    assert callable(Serve.start_server)
