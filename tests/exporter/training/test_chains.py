"""Training-time testing in one pass against chains that run one step at a time, and packed rows against single ones."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from specrt.exporter.heads.config import HeadConfig, HeadVariant
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.unroll import ChainAttention
from specrt.exporter.training.batches import packed_mask

VOCAB, SIZE, DEPTH = 40, 16, 4


def random_head(norm_output: bool = False) -> Head:
    layer = LlamaConfig(hidden_size=SIZE, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(3)
    head = Head(HeadConfig(layer, SIZE, VOCAB, VOCAB, HeadVariant((1, 2, 3), norm_output=norm_output)))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return head.requires_grad_(False)


def one_step_at_a_time(head: Head, ids: torch.Tensor, taps: torch.Tensor, first: int) -> list[torch.Tensor]:
    """What lm_head reads [H] at each step of the chain after target feature ``first``, on a growing KV cache."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        repeats = query.shape[1] // key.shape[1]
        all_keys, all_values = (torch.cat(found, 2).repeat_interleave(repeats, 1) for found in (keys, values))
        weights = (query @ all_keys.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1)
        out: torch.Tensor = (weights @ all_values).transpose(1, 2)
        return out

    found = []
    features = list(head.fuse(taps)[: first + 1])
    for pair in range(first + DEPTH):
        token, position = ids[None, pair + 1 : pair + 2], torch.tensor([[pair]])
        normalized, following = head(token, features[pair][None, None], position, attend)
        if pair >= first:
            found.append(normalized[0, 0])
            features.append(following[0, 0])
    return found


def in_one_pass(head: Head, ids: torch.Tensor, taps: torch.Tensor, document: torch.Tensor) -> list[torch.Tensor]:
    """What lm_head reads [L, H] of each step, for one packed row."""
    positions = torch.cat([torch.arange(int((document == n).sum())) for n in document.unique(sorted=True)])
    attend, features, found = ChainAttention(packed_mask(document[None])), head.fuse(taps)[None], []
    for step in range(DEPTH):
        normalized, features = head(ids.roll(-1 - step)[None], features, positions[None] + step, attend)
        found.append(normalized[0])
    return found


@pytest.mark.parametrize("norm_output", [False, True])
def test_a_pass_over_all_chains_equals_each_chain_alone(norm_output: bool) -> None:
    head, length = random_head(norm_output), 12
    ids, taps = torch.randint(VOCAB, (length,)), torch.randn(length, 3 * SIZE)
    found = in_one_pass(head, ids, taps, torch.zeros(length, dtype=torch.long))
    for first in range(length - DEPTH):
        for step, expected in enumerate(one_step_at_a_time(head, ids, taps, first)):
            torch.testing.assert_close(found[step][first], expected, rtol=1e-4, atol=1e-5)


def test_conversations_of_a_row_do_not_see_each_other() -> None:
    head = random_head()
    ids, taps = torch.randint(VOCAB, (14,)), torch.randn(14, 3 * SIZE)
    document = torch.tensor([0] * 6 + [1] * 8)
    packed = in_one_pass(head, ids, taps, document)
    alone = in_one_pass(head, ids[6:], taps[6:], document[6:])
    for step in range(DEPTH):
        last = 8 - 1 - step  # the rows whose tokens are in the conversation
        torch.testing.assert_close(packed[step][6 : 6 + last], alone[step][:last], rtol=1e-4, atol=1e-5)
