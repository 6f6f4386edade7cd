"""Stages of Hugging Face models compute what the whole model computes."""

import contextlib
import json
import math
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from one_rank_engine import one_rank
from run_log import GIVE_UP_S
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, families, tiny, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Glm4vMoeConfig,
    GPT2Config,
    Llama4Config,
    LlamaConfig,
    Mistral3Config,
    Qwen3_5MoeConfig,
    dynamic_module_utils,
)
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils import is_flash_attn_2_available

import perseus_ds
from perseus_ds.errors import ConfigError, PerseusError
from perseus_ds.huggingface import hub
from perseus_ds.huggingface.stages import (
    CausalLoss,
    build_stage,
    layers_of_stages,
    read_config,
    save_pretrained,
    trained_tokens,
)
from perseus_ds.layouts.partition import uniform_cut

# Their layers need more from each other than the hidden states named by their plans.
CANNOT_BE_CUT = {
    "deepseek_v4": "shape",
    "gemma3n_text": "shape",
    "gemma4_text": "do not run alone",
    "glm_moe_dsa": "do not run alone",
    "hrm_text": "does not have",
    "hy_v4": "do not run alone",
}


def whole_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def through(stages, ids, *others):
    values = (ids, *others)
    for stage in stages:
        values = stage(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values


def assert_same_numbers(config, cut, folder, *others):
    """Assert that loss, logits and gradients of the stages are those of the whole model."""
    model = whole_model(config)
    model.save_pretrained(folder)
    ids = token_ids()
    named = ("input_ids", "attention_mask", "position_ids")[: 1 + len(others)]
    torch.manual_seed(1)
    expected = model(**dict(zip(named, (ids, *others), strict=True)), labels=ids, use_cache=False)
    expected.loss.backward()
    stages = [build_stage(folder, cut, index, inputs=named) for index in range(len(cut))]
    torch.manual_seed(1)
    outputs = through(stages, ids, *others)
    loss = CausalLoss(config)(outputs, ids, num_items_in_batch=trained_tokens([ids]))
    loss.backward()
    assert (outputs[0] - expected.logits).norm() <= 1e-5 * expected.logits.norm()
    assert abs(loss - expected.loss) <= 1e-5 * expected.loss
    gradients = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-12, name
    assert sum(p.numel() for stage in stages for p in stage.parameters()) >= sum(p.numel() for p in model.parameters())


def assert_new_weights_are_equal_and_finite(config):
    """Assert that two builds with one seed, on memory that has been used, have the same finite values."""
    first, second = (dict(build_stage(config, (4,), 0).model.state_dict()) for _ in range(2))
    for name, value in first.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second[name]), name


@pytest.fixture
def used_memory(monkeypatch):
    """Memory without values, which contains NaN or zeros by chance, contains NaN."""
    empty_like = torch.empty_like

    def used(*args, **kwargs):
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty_like", used)


# Both have values that only their constructors compute, or buffers of parts that text does not use.
@pytest.mark.parametrize("family", ["apertus", "phi4_multimodal"])
def test_values_that_the_constructor_computes_are_those_of_the_whole_model(family, used_memory):
    config = tiny(family)
    assert_new_weights_are_equal_and_finite(config)
    expected = dict(whole_model(config).named_buffers())
    buffers = dict(build_stage(config, (4,), 0).model.named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[name], value) for name, value in expected.items())


def test_a_parameter_that_nothing_initialises_is_an_error_that_names_it(tmp_path, monkeypatch):
    config = tiny("llama")
    whole = whole_model(config)
    whole.save_pretrained(tmp_path)
    construct = LlamaMLP.__init__

    def with_another_one(mlp, config):
        construct(mlp, config)
        mlp.scale = torch.nn.Parameter(torch.empty(3))

    monkeypatch.setattr(LlamaMLP, "__init__", with_another_one)
    for source in (config, tmp_path):
        with pytest.raises(ConfigError, match=r"gives values to model\.layers\.2\.mlp\.scale, "):
            build_stage(source, (2, 2), 1)


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3"])
def test_stages_give_the_numbers_of_the_whole_model(family, tmp_path):
    assert_same_numbers(tiny(family), (1, 2, 1), tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("family", sorted(families().keys() - CANNOT_BE_CUT))
def test_stages_of_every_family_give_the_numbers_of_the_whole_model(family, tmp_path, used_memory):
    assert_same_numbers(tiny(family), (1, 1, 1, 1), tmp_path)
    assert_new_weights_are_equal_and_finite(tiny(family))


@pytest.mark.extended
@pytest.mark.parametrize("family", CANNOT_BE_CUT)
def test_a_model_that_cannot_be_cut_is_an_error_when_its_stages_are_built(family):
    with pytest.raises(ConfigError, match=CANNOT_BE_CUT[family]):
        [build_stage(tiny(family), (1, 1, 1, 1), index) for index in range(4)]


def needs_gpu(*_, **__):
    raise RuntimeError("no kernel for the CPU\nsecond line")


def test_a_model_whose_attention_needs_a_gpu_is_cut_without_one():
    AttentionInterface.register("for_gpus_only", needs_gpu)
    config = tiny("llama", attn_implementation="for_gpus_only")
    stage = build_stage(config, (2, 2), 0)
    assert stage.model.config._attn_implementation == "for_gpus_only"
    with pytest.raises(RuntimeError, match="no kernel for the CPU"):
        stage(token_ids())
    found = perseus_ds.partition(config, stages=2, micro_batches=2, sequence_length=8, gpu="a40")
    assert sum(found.cut) == 4
    assert config._attn_implementation == "for_gpus_only"


@pytest.mark.skipif(is_flash_attn_2_available(), reason="FlashAttention is installed")
def test_a_package_of_kernels_that_is_missing_is_named_and_not_needed_to_find_a_cut():
    config = tiny("llama", attn_implementation="flash_attention_2")
    assert perseus_ds.partition(config, stages=2, micro_batches=2, sequence_length=8, gpu="a40").cut
    with pytest.raises(ConfigError, match=r"LlamaConfig: FlashAttention2 .* doesn't seem to be installed"):
        build_stage(config, (2, 2), 0)


def test_a_layer_that_does_not_run_without_a_gpu_is_an_error_with_its_cause(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", needs_gpu)
    cause = r"without a GPU, which kernels of it may need \(RuntimeError: no kernel for the CPU\)"
    with pytest.raises(ConfigError, match=f"layers 0 to 1 do not run alone {cause}"):
        build_stage(tiny("llama"), (2, 2), 0)


def test_every_trained_token_of_a_batch_has_the_same_weight(tmp_path):
    config = tiny("mixtral", output_router_logits=False)
    whole = whole_model(config)
    whole.save_pretrained(tmp_path)
    parts = [(ids, ids.clone()) for ids in token_ids(3).split(2)]
    for (_, labels), not_learnt in zip(parts, (0, 16, 13), strict=True):
        labels[:, :not_learnt] = -100
    trained = 2 * (15 + 0 + 3)
    expected = sum(whole(ids, labels=labels, num_items_in_batch=trained).loss for ids, labels in parts)
    expected.backward()
    stages = [build_stage(tmp_path, (1, 3), index) for index in range(2)]
    loss = CausalLoss(config)
    with loss.counting_tokens([labels for _, labels in parts]):
        losses = [loss(through(stages, ids)[0], labels) for ids, labels in parts]
    mean = sum(losses) / 3
    mean.backward()
    assert losses[1] == 0
    assert abs(mean - expected) <= 1e-5 * expected
    gradients = {name: p.grad for stage in stages for name, p in stage.model.named_parameters()}
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_the_loss_of_a_batch_without_trained_tokens_is_zero():
    loss, stage = CausalLoss(tiny("llama")), build_stage(tiny("llama"), (4,), 0)
    nothing = torch.full((2, 16), -100)
    with loss.counting_tokens([nothing]):
        value = loss(stage(token_ids()), nothing)
    value.backward()
    assert value == 0
    assert all(parameter.grad.eq(0).all() for parameter in stage.parameters())
    with pytest.raises(ConfigError, match=r"trained tokens in the whole batch is unknown.*perseus_ds\.attach"):
        loss(stage(token_ids()), nothing)


def test_masks_and_positions_reach_every_stage(tmp_path):
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    assert_same_numbers(tiny("llama"), (1, 3), tmp_path, mask, torch.arange(16).expand(2, 16) % 8)


def test_the_loss_of_routers_leaves_out_padding_as_in_the_whole_model(tmp_path):
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 4:] = 0
    assert_same_numbers(tiny("mixtral", router_aux_loss_coef=0.5), (1, 3), tmp_path, mask)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "gptq"])
def test_quantised_weights_are_an_error_that_names_the_method(method, tmp_path):
    config = tiny("qwen3")
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"its weights are quantised \({method}, in quantization_config\)"):
        build_stage(tmp_path, (2, 2), 0)
    assert build_stage(tmp_path, (2, 2), 0, pretrained=False).is_first


def test_weights_cannot_be_read_from_a_configuration():
    with pytest.raises(ConfigError, match="a configuration has no weights to read"):
        build_stage(tiny("qwen3"), (2, 2), 0, pretrained=True)


def test_new_weights_are_the_same_for_every_cut():
    config = tiny("qwen3", tie_word_embeddings=True)

    def weights(cut):
        stages = [build_stage(config, cut, index) for index in range(len(cut))]
        return {name: value for stage in stages for name, value in stage.model.named_parameters()}

    whole, cut = weights((4,)), weights((1, 2, 1))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    assert 0.01 < whole["model.layers.1.mlp.up_proj.weight"].std() < 0.03


def test_new_weights_leave_the_random_state_as_it_was():
    before = torch.random.get_rng_state()
    build_stage(tiny("llama"), (2, 2), 0)
    perseus_ds.partition(tiny("llama"), stages=2, micro_batches=2, sequence_length=8, gpu="a40")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_stage_has_storage_for_its_own_layers_only():
    config = tiny("llama")
    names = {name for name, _ in build_stage(config, (1, 2, 1), 1).model.named_parameters()}
    assert {name.split(".")[2] for name in names} == {"1", "2"}


def test_gradient_checkpointing_changes_no_gradient():
    def gradients(checkpointing):
        stages = [build_stage(tiny("llama"), (2, 2), i, gradient_checkpointing=checkpointing) for i in range(2)]
        # Two micro-batches are processed concurrently, as in a pipeline.
        loss = CausalLoss(tiny("llama"))
        parts = [token_ids(seed=seed) for seed in range(2)]
        with loss.counting_tokens(parts):
            losses = [loss(through(stages, ids), ids) for ids in parts]
        for loss in losses:
            loss.backward()
        return [p.grad for stage in stages for p in stage.parameters()]

    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_the_parts_of_stages_are_those_of_the_model():
    config = tiny("mixtral", num_hidden_layers=3)
    parts = [part for index in range(2) for part in build_stage(config, (2, 1), index).layout_parts]
    assert [part.kind for part in parts] == ["embedding", "moe", "moe", "moe", "head"]
    assert len({part.parameters for part in parts[1:4]}) == 1


def test_a_tied_embedding_is_an_error_where_stages_share_no_weight():
    config = tiny("qwen3", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="config=, a configuration with tie_word_embeddings=False"):
        perseus_ds.pipeline_stage(config, stage_index=0, num_stages=2, device="cpu")


@pytest.mark.parametrize("edited", ["argument", "folder"])
def test_a_head_that_the_weights_lack_is_a_copy_of_the_embedding(edited, tmp_path, caplog):
    whole = whole_model(tiny("qwen3", tie_word_embeddings=True))
    whole.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    config.tie_word_embeddings = False
    if edited == "folder":
        config.save_pretrained(tmp_path)
    stages = [build_stage(tmp_path, (1, 3), index, config=config if edited == "argument" else None) for index in (0, 1)]
    ids = token_ids()
    assert torch.allclose(through(stages, ids)[0], whole(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(stages[1].model.lm_head.weight, whole.model.embed_tokens.weight)
    said = f"perseus: {tmp_path} has no lm_head.weight. It begins as a copy of the embedding."
    assert said in caplog.messages


def test_weights_that_are_missing_are_named_and_the_same_on_every_rank_and_for_every_cut(tmp_path, caplog):
    whole_model(tiny("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = [name for name in weights if "layers.3.mlp" in name]
    kept = {name: value for name, value in weights.items() if name not in names}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = []
    for cut in ((2, 2), (2, 2), (1, 3)):
        torch.rand(3)  # ranks have drawn different numbers before
        before = torch.random.get_rng_state()
        found.append(dict(build_stage(tmp_path, cut, 1).model.named_parameters()))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(found[0][name], value[name]) for value in found for name in names)
    assert all(torch.equal(found[0][name], weights[name]) for name in found[0] if name not in names)
    said = f"perseus: {tmp_path} has no {', '.join(sorted(names))}. Their values are new, with seed 1234."
    assert said in caplog.messages


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_saved_stages_load_as_the_whole_model(family, tmp_path):
    config = tiny(family)
    stages = [build_stage(config, (1, 2, 1), index) for index in range(3)]
    # Of another model, and of another cut; neither is read afterwards.
    whole_model(config).save_pretrained(tmp_path)
    save_pretrained([build_stage(config, (2, 2), index, seed=1) for index in range(2)], tmp_path)
    save_pretrained(stages, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = token_ids()
    assert torch.allclose(loaded(ids).logits, through(stages, ids)[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def _one_rank(tmp_path):
    with one_rank(tmp_path):
        yield


@pytest.mark.usefixtures("_one_rank")
def test_stages_that_fsdp_shards_load_as_the_whole_model(tmp_path):
    stage = build_stage(tiny("qwen3"), (4,), 0)
    logits = stage(token_ids())
    fully_shard(stage, mesh=init_device_mesh("cpu", (1,)))
    save_pretrained(stage, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.allclose(loaded(token_ids()).logits, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_one_rank")
def test_stages_that_the_first_fsdp_wraps_are_refused_before_training(tmp_path):
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(build_stage(tiny("llama"), (4,), 0), device_id=cpu)
    schedule = ScheduleGPipe(PipelineStage(wrapped, 0, 1, cpu), 1, loss_fn=CausalLoss(tiny("llama")))
    for settings in ({"enabled": True, "mode": "observe", "device": "simulated"}, {"enabled": False}):
        with pytest.raises(ConfigError, match=r"cannot be saved\. Use fully_shard"):
            perseus_ds.attach(schedule, settings)
    with pytest.raises(ConfigError, match=r"cannot be saved\. Use fully_shard"):
        save_pretrained(wrapped, tmp_path / "saved")


class Killed(BaseException):
    """The job is killed here."""


@pytest.mark.parametrize("whole", [True, False], ids=["in one file", "in stages"])
def test_a_job_killed_while_it_saves_leaves_a_folder_that_loads_as_one_model_or_not_at_all(
    whole, tmp_path, monkeypatch
):
    config, ids = tiny("llama"), token_ids()
    old, new = ([build_stage(config, (1, 3), index, seed=seed) for index in range(2)] for seed in (1, 2))
    logits = [through(stages, ids)[0] for stages in (old, new)]
    left = math.inf

    def counted(change):
        def changed(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*args, **kwargs)

        return changed

    for name in ("replace", "unlink", "write_text"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    found = []
    while not found or found[-1] != "new":
        folder = tmp_path / str(len(found))
        save_pretrained(old, folder)
        if whole:
            one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            shutil.rmtree(folder)
            one.save_pretrained(folder)
        left = len(found)
        with contextlib.suppress(Killed):
            save_pretrained(new, folder)
        left = math.inf
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        except OSError:
            found.append("no model")
            save_pretrained(new, folder)
            assert torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, logits[1])
        else:
            found.append(
                {logit.allclose(loaded): name for logit, name in zip(logits, ("old", "new"), strict=True)}[True]
            )
    assert found[0] == "old"
    assert found == sorted(found, key=["old", "no model", "new"].index)


def test_a_model_that_cannot_be_written_says_which_rank_could_not(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PerseusError, match="rank 0 could not write its part of the model"):
        save_pretrained(build_stage(tiny("llama"), (4,), 0), tmp_path / "file")
    with pytest.raises(ConfigError, match="Linear has no stage of a Hugging Face model"):
        save_pretrained(torch.nn.Linear(1, 1), tmp_path)


def test_cuts_are_checked():
    assert uniform_cut(7, 3) == (3, 2, 2)
    assert layers_of_stages((3, 4), 7) == [range(3), range(3, 7)]
    with pytest.raises(ConfigError, match="1 to 7 stages, not 8"):
        uniform_cut(7, 8)
    with pytest.raises(ConfigError, match=r"the model has 7 layers; \[3, 3\] are 6"):
        layers_of_stages((3, 3), 7)
    with pytest.raises(ConfigError, match=r"\[1, 3\] are 2 stages, not 3"):
        perseus_ds.pipeline_stage(tiny("llama"), stage_index=0, num_stages=3, device="cpu", cut=(1, 3))
    with pytest.raises(ConfigError, match="The model has 4 layers, so 1 to 4 stages, not 5"):
        perseus_ds.pipeline_module(tiny("llama"), num_stages=5)


def test_a_model_without_a_plan_or_that_cannot_be_read_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="base_model_pp_plan"):
        read_config(GPT2Config())
    with pytest.raises(ConfigError, match="hub"):
        read_config(tmp_path / "nothing")


def tiny_with_images(config):
    """Return the configuration of a tiny model with a text model and an unused part for images."""
    whole = config()
    text, vision = type(whole.text_config), type(whole.vision_config)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    sizes |= {"num_hidden_layers": 1, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "head_dim": 8}
    return config(
        text_config=text(**{name: size for name, size in SIZES.items() if name in dir(whole.text_config)}),
        vision_config=vision(**{name: size for name, size in sizes.items() if name in dir(whole.vision_config)}),
    )


@pytest.mark.parametrize("kind", [Gemma3Config, Mistral3Config, Qwen3_5MoeConfig])
def test_the_text_model_of_one_with_images_is_cut_and_saved(kind, tmp_path):
    whole = AutoModelForImageTextToText.from_config(tiny_with_images(kind)).eval()
    whole.save_pretrained(tmp_path)
    ids = token_ids()
    expected = whole(ids, use_cache=False).logits
    stages = [build_stage(tmp_path, (1, 3), index).eval() for index in range(2)]
    assert torch.allclose(through(stages, ids)[0], expected, rtol=1e-4, atol=1e-6)
    save_pretrained(stages, tmp_path / "text")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    assert type(loaded.config) is type(whole.config.text_config)
    assert torch.allclose(loaded(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-6)


def test_a_model_whose_text_model_cannot_be_cut_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"Llama4Config with the text model Llama4TextConfig: .* no pipeline plan"):
        read_config(Llama4Config())
    with pytest.raises(ConfigError, match="the text model Glm4vMoeTextConfig: transformers has no causal model for it"):
        read_config(Glm4vMoeConfig())


def test_quantised_weights_of_a_model_with_images_are_an_error(tmp_path):
    config = tiny_with_images(Mistral3Config)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its weights are quantised \(fp8, in quantization_config\)"):
        build_stage(tmp_path, (2, 2), 0)


def test_data_that_do_not_fit_the_model_are_an_error():
    with pytest.raises(ConfigError, match=r"positions for 64 tokens .* not for 65"):
        build_stage(tiny("llama"), (4,), 0, sequence_length=65)
    with pytest.raises(ConfigError, match="the tokenizer has 97 tokens, the model 96"):
        build_stage(tiny("llama"), (4,), 0, vocabulary=97)
    build_stage(tiny("llama"), (4,), 0, sequence_length=64, vocabulary=96)


@pytest.fixture
def silent_hub(tmp_path, monkeypatch):
    """Cache folder of this machine, with a hub that accepts connections but never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(hub, "_HUB_ANSWERS_S", 0.2)
        yield tmp_path / "hub"


def test_a_hub_that_does_not_answer_is_an_error_that_says_what_to_do(silent_hub):
    with pytest.raises(ConfigError, match=r'does not respond .* "hf download someone/model --local-dir FOLDER"'):
        read_config("someone/model")


@pytest.fixture
def cached_model(silent_hub):
    """Name of a model whose versions ``main`` and ``v1`` are in the cache of this machine."""
    folder = silent_hub / "models--someone--model"
    whole_model(tiny("llama")).save_pretrained(folder / "snapshots" / "0123")
    (folder / "refs").mkdir()
    for name in ("main", "v1"):
        (folder / "refs" / name).write_text("0123")
    return "someone/model"


def test_a_model_that_this_machine_has_needs_no_hub(cached_model):
    assert build_stage(cached_model, (2, 2), 0).is_first


@pytest.fixture
def requests(monkeypatch):
    """The requests to the hub, which is not reached."""
    asked = []

    def model_info(api, name, *, revision, timeout):
        asked.append((name, revision, api.token))
        raise OSError("the hub is not reached")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    return asked


@pytest.mark.usefixtures("_one_rank")
def test_the_hub_gets_one_request_per_node_for_configuration_and_weights(cached_model, requests):
    options = {"revision": "v1", "token": "secret"}
    for index in range(2):  # as two ranks, each with a request of its own before
        config = read_config(cached_model, **options)
        build_stage(cached_model, (2, 2), index, config=config, **options)
        perseus_ds.pipeline_stage(cached_model, stage_index=0, num_stages=1, device="cpu", **options)
    assert requests == 2 * [("someone/model", "v1", "secret")]


@pytest.mark.usefixtures("_one_rank")
def test_a_rank_asks_the_hub_itself_if_the_first_one_of_its_node_failed(silent_hub, requests):
    for _ in range(2):
        with pytest.raises(ConfigError, match="this machine has no copy of its configuration"):
            read_config("someone/missing")
    assert len(requests) == 2


@pytest.mark.usefixtures("_one_rank")
def test_ranks_wait_until_the_first_one_of_their_node_has_read_a_file(cached_model, requests, monkeypatch):
    is_waiting, sleep, model_info = threading.Event(), time.sleep, HfApi.model_info

    def answered_once_another_waits(*args, **kwargs):
        assert is_waiting.wait(GIVE_UP_S)
        return model_info(*args, **kwargs)

    def waits(_):
        is_waiting.set()
        sleep(0.001)

    monkeypatch.setattr(HfApi, "model_info", answered_once_another_waits)
    monkeypatch.setattr(hub.time, "sleep", waits)
    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(read_config, [cached_model] * 2))
    assert [type(config) for config in found] == [LlamaConfig, LlamaConfig]
    assert len(requests) == 1


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class CustomConfig(LlamaConfig):
    model_type = "custom"
class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
"""


def test_a_model_with_code_of_its_own_is_cut_if_its_code_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    whole = whole_model(tiny("llama"))
    whole.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "custom.py").write_text(CODE)
    file = tmp_path / "model" / "config.json"
    code = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomForCausalLM"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "custom", "auto_map": code}))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        build_stage(tmp_path / "model", (4,), 0)
    stage = build_stage(tmp_path / "model", (4,), 0, trust_remote_code=True)
    assert type(stage.model).__name__ == "CustomForCausalLM"
    assert torch.allclose(stage(token_ids()), whole(token_ids()).logits, rtol=1e-5, atol=1e-6)
