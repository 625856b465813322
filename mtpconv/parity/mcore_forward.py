"""Running a Megatron model: all heads in one forward, or trunk and depths by themselves."""

from __future__ import annotations

from typing import Any

from mtpconv.parity import runtime
from mtpconv.parity.mcore import McoreModel


def heads(model: McoreModel, tokens: Any) -> dict[str, Any]:
    """Logits of every head for one row of tokens, in float32 on the CPU.

    This is GPTModel's own forward. Megatron rolls the row to the left for each depth and fills
    in token 0, so the last d + 1 positions of depth d stand on made-up tokens and are cut off.

    Shape: tokens [s]; each head [s or less, vocab].
    """
    import torch

    module = model.module
    row = tokens[None].to(runtime.require_session())
    size = row.shape[1]
    states: list[Any] = []
    source = module.mtp if model.depths else module.decoder
    hook = source.register_forward_hook(lambda _module, _args, output: states.append(output))
    try:
        with torch.no_grad(), runtime.quiet():
            # 0.16.1 cannot run a model with MTP without labels; the loss is not used.
            module(row, _positions(row), _ahead(row), labels=row)
            chunks = torch.chunk(states[0], 1 + model.depths, 0)
            found = [logits(model, chunk[:, 0]) for chunk in chunks]
    finally:
        hook.remove()
    named = {"trunk": found[0]}
    named |= {f"depth {d}": value[: size - 1 - d] for d, value in enumerate(found[1:])}
    return named


def logits(model: McoreModel, hidden: Any) -> Any:
    """Logits of hidden states after a final norm, padding cut off, in float32 on the CPU.

    Shape: hidden [s, h]; result [s, vocab].
    """
    import torch

    module = model.module
    weight = module.shared_embedding_or_output_weight() if model.settings.tied else None
    with torch.no_grad():
        value, _ = module.output_layer(hidden[:, None], weight=weight)
    return value[:, 0, : model.settings.geometry.dim("vocab_size")].float().cpu()


def trunk_hidden(model: McoreModel, tokens: Any) -> Any:
    """Hidden states of the trunk after its final norm.

    Shape: tokens [s]; result [s, h].
    """
    import torch

    module = model.module
    row = tokens[None].to(runtime.require_session())
    with torch.no_grad(), runtime.quiet():
        embedded = module.embedding(input_ids=row, position_ids=_positions(row))
        return module.decoder(
            hidden_states=embedded,
            attention_mask=_ahead(row),
            rotary_pos_emb=_rope(model, row.shape[1]),
        )[:, 0]


def depth_hidden(model: McoreModel, number: int, hidden: Any, following: Any) -> Any:
    """Hidden states of an MTP depth after its final norm.

    `hidden` is what the depth before (or the trunk) gave, `following` the tokens to embed.

    Shape: hidden [n, h], following [n]; result [n, h].
    """
    import torch

    module = model.module
    row = following[None].to(runtime.require_session())
    positions = _positions(row)
    with torch.no_grad(), runtime.quiet():
        # The layer rolls the ids that it is given; the embedding looks at the unrolled ones.
        found = module.mtp.layers[number](
            input_ids=row,
            position_ids=positions,
            hidden_states=hidden[:, None],
            attention_mask=_ahead(row),
            rotary_pos_emb=_rope(model, row.shape[1]),
            embedding=lambda **_rolled: module.embedding(input_ids=row, position_ids=positions),
        )
    return found[0][:, 0]


def _positions(row: Any) -> Any:
    import torch

    return torch.arange(row.shape[1], device=row.device)[None]


def _ahead(row: Any) -> Any:
    """True where a position must not look: everything ahead of it."""
    import torch

    size = row.shape[1]
    return torch.ones(size, size, dtype=torch.bool, device=row.device).triu(1)[None, None]


def _rope(model: McoreModel, size: int) -> Any:
    """Rope angles for attention that is not MLA, which makes its own."""
    return None if model.settings.mla else model.module.rotary_pos_emb(size)
