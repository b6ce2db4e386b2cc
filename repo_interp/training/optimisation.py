"""One step of training: AdamW on the gradients of some batches, clipped.

    g = mean over the batches of d loss / d weights;   g <- g min(1, clip / |g|);   AdamW(beta_1, beta_2, weight decay on matrices)

The model is run up to its last hidden states, and logits are made for answer tokens only. Knows nothing about tasks, directories or
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from repo_interp.training.batches import Batch
from repo_interp.training.configuration import TrainingConfiguration


def make_optimizer(model: nn.Module, configuration: TrainingConfiguration) -> torch.optim.AdamW:
    """AdamW over all weights; vectors (norms, biases) do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": configuration.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (configuration.beta_1, configuration.beta_2)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=configuration.learning_rate, betas=betas)


def answer_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Mean cross-entropy of the answer tokens, in nats."""
    hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[batch.rows, batch.columns])
    return nn.functional.cross_entropy(logits.float(), batch.targets)


def take_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], learning_rate: float, clip: float
) -> float:
    """Change the weights once; returns the mean loss of the batches before."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        loss = answer_loss(model, batch) / len(batches)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total
