# SPDX-License-Identifier: Apache-2.0
"""A Llama small enough for any machine, whose answers depend on the whole prompt.

Note [Weights that read the whole prompt]
A randomly initialised transformer forgets: its attention is close to uniform, a block
of the KV cache is a small share of an average, and greedy decoding soon repeats one
token whatever the prompt was. A KV cache that comes back wrong would go unnoticed.
Here queries and keys are drawn three times as wide as usual, so that each head picks
out few positions by their content and distance, and values are drawn twice as wide,
so that what it picks outweighs the last token's own embedding. Prompts that share
everything but their first words then part within a few tokens. The rows of the output
layer that belong to control tokens and stray bytes are zero, so they are never the
greedy choice: an answer is words, and it ends at `max_tokens`.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# What takes seconds to import is imported where a model is made, which is once.
if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_TOKENS = 2048

_SEED = 7
_END = "</s>"
_ROLES = ("system", "user", "assistant")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = """
The harbour wakes before the town does. Small boats leave with the tide and come back
heavy, and every crate they bring is weighed, marked and carried up the hill. What will
be wanted soon stays near the water; what can wait goes to the long house above, where
there is more room and the stairs are steep. The keeper writes down where each crate
went, and when someone asks for one he sends a runner, and the others go on working.
A slow runner is a nuisance. A wrong crate is worse: nobody looks inside before it is
too late. So the keeper counts twice, and once a month he has all of them brought down,
opened, and compared with his book. When winter closes the harbour everything is carried
up, the near store is swept and locked, and the whole place sleeps until the first warm
morning, when it must stand again exactly as it stood. Under the lamp the old clerk
teaches a child to read the marks: this one for glass, this one for grain, that one for
things which must never be dropped. Outside, rain falls on green slate and white stone,
gulls quarrel above the bridge, and far away a bell is ringing for someone else.
"""


def _tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=[_END, *(f"<|{role}|>" for role in _ROLES)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        model_max_length=CONTEXT_TOKENS,
        chat_template=_CHAT_TEMPLATE,
    )


def _model(tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # A head size of 64 is one that the attention backends of GPUs take; two KV heads
    # are what two tensor-parallel ranks can share.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        architectures=[LlamaForCausalLM.__name__],
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            draw = torch.randn(weight.shape, generator=generator)
            weight.copy_(draw * _standard_deviation(name, weight.shape[1]))
        for token, token_id in tokenizer.get_vocab().items():
            if not token.removeprefix("\u0120").isalpha() or not token[-1].isascii():
                model.lm_head.weight[token_id].zero_()
    return model


def _standard_deviation(name: str, inputs: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    gain = 1.0
    if "q_proj" in name or "k_proj" in name:
        gain = 3.0
    elif "v_proj" in name or "o_proj" in name:
        gain = 2.0
    return float(gain * inputs**-0.5)


def write_demo_model(folder: Path) -> Path:
    """Makes the model and its tokenizer in `folder`, unless they are there already.

    The folder holds the sha256 of this file as its fingerprint, so that one made by
    another version, or only half made, is made again. The weights are float32,
    919 thousand of them; the context is `CONTEXT_TOKENS` tokens.

    Returns:
        `folder`.

    Raises:
        OSError: The folder cannot be written.
    """
    fingerprint = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if _fingerprint(folder) == fingerprint:
        return folder
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(draft)
        model = _model(tokenizer)
        model.config.save_pretrained(draft)
        save_file(model.state_dict(), draft / "model.safetensors", {"format": "pt"})
        (draft / "fingerprint").write_text(fingerprint)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError:
        # Another process may have put the same model there first.
        if _fingerprint(folder) != fingerprint:
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _fingerprint(folder: Path) -> str | None:
    try:
        return (folder / "fingerprint").read_text()
    except FileNotFoundError:
        return None
