# SPDX-License-Identifier: Apache-2.0
"""The demo model: the same every time, small, and attentive to the whole prompt."""

import hashlib
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from vllm_rocm_memory.sim.demo_model import CONTEXT_TOKENS, write_demo_model

BLOCK = 32
ANSWER = 12
FIRST_WORDS = (
    "amber bark cedar drift ember fern glade heath iris jade kelp lark moss nettle "
    "oak pearl quartz reed sage tide umber vale willow yarrow zinc alder birch clay "
    "dune elm flint grove"
)
WORDS = FIRST_WORDS.split()
BODY = " The keeper counts twice and writes down where each crate went." * 24


@pytest.fixture(scope="module")
def model(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype="float32").eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


@torch.no_grad()
def answers(model, cache: DynamicCache, ids: torch.Tensor) -> list[tuple[int, ...]]:
    """Greedy answers to a batch of prompts whose beginning is in the cache."""
    chosen = []
    for _ in range(ANSWER):
        output = model(ids, past_key_values=cache, use_cache=True)
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(ids[:, 0].tolist())
    return list(zip(*chosen, strict=True))


def test_it_is_the_same_every_time_and_made_once(demo_model, tmp_path):
    other = write_demo_model(tmp_path / "new" / "demo")
    assert digests(other) == digests(demo_model)
    written = {path: path.stat().st_mtime_ns for path in other.iterdir()}
    write_demo_model(other)
    assert {path: path.stat().st_mtime_ns for path in other.iterdir()} == written
    assert [path.name for path in other.parent.iterdir()] == ["demo"], "no draft left"


@pytest.mark.parametrize("damage", ["half made", "other version"])
def test_what_is_not_this_model_is_made_again(demo_model, tmp_path, damage):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "stale.json").write_text("{}")
    if damage == "other version":
        (folder / "fingerprint").write_text("another")
    write_demo_model(folder)
    assert digests(folder) == digests(demo_model)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_demo_model(tmp_path / "file" / "demo")


def test_it_is_small_and_takes_long_prompts(model, tokenizer):
    assert sum(weight.numel() for weight in model.parameters()) == 918_656
    assert CONTEXT_TOKENS == model.config.max_position_embeddings >= 1024
    assert model.config.head_dim == 64
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where is the grain?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<|user|>Where is the grain?</s><|assistant|>"
    text = "Öl, 漢字 and\ttabs"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_answers_are_words(model, tokenizer):
    ids = tokenizer(WORDS[0] + BODY, return_tensors="pt").input_ids
    (answer,) = answers(model, DynamicCache(), ids)
    text = tokenizer.decode(answer)
    assert set(text) <= set(string.ascii_letters + " ")
    assert len(set(answer)) > ANSWER // 2, "not one token over and over"


def test_prompts_that_differ_in_their_first_words_get_different_answers(
    model, tokenizer
):
    body = tokenizer(BODY).input_ids
    assert len(body) > 320
    prompts = [[*tokenizer(word).input_ids[:2], *body] for word in WORDS]
    assert len({tuple(prompt) for prompt in prompts}) == len(WORDS) == 32
    found = answers(model, DynamicCache(), torch.tensor(prompts))
    assert len(set(found)) == len(WORDS)


def test_the_answer_depends_on_the_blocks_of_the_cache(model, tokenizer):
    ids = tokenizer(WORDS[0] + BODY, return_tensors="pt").input_ids
    blocks = (ids.shape[1] - 1) // BLOCK
    with torch.no_grad():
        whole = model(ids[:, : blocks * BLOCK], use_cache=True).past_key_values
    # One row for each block, in which that block is zero, and one intact row.
    damaged = DynamicCache()
    for index, layer in enumerate(whole.layers):
        sides = []
        for side in (layer.keys, layer.values):
            rows = side.repeat(blocks + 1, 1, 1, 1)
            for block in range(blocks):
                rows[block, :, block * BLOCK : (block + 1) * BLOCK] = 0
            sides.append(rows)
        damaged.update(*sides, index)
    rest = ids[:, blocks * BLOCK :].repeat(blocks + 1, 1)
    *without, intact = answers(model, damaged, rest)
    assert without[0] != intact, "the first block matters"
    assert sum(answer != intact for answer in without) > 0.7 * blocks
