"""One step of training: AdamW on the gradients of some questions, clipped.

    g = mean over the questions of d loss / d weights;   g <- g min(1, clip / |g|);   AdamW(beta_1, beta_2, weight decay on matrices)

The model is run up to its last hidden states, and logits are made for targets only. Knows nothing about tasks, directories or
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from repo_interp.training.batches import Question
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


def target_logits(model: PreTrainedModel, question: Question) -> Float[Tensor, "target token_id"]:
    """What the model predicts at every target, float32; logits of other tokens are never made."""
    hidden = model.model(question.tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[question.rows, question.columns]).float()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def target_loss(model: PreTrainedModel, question: Question) -> Float[Tensor, ""]:
    """Mean cross-entropy of the targets, in nats."""
    return nn.functional.cross_entropy(target_logits(model, question), question.targets)


def take_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    questions: Sequence[Question],
    learning_rate: float,
    clip: float,
) -> float:
    """Change the weights once; returns the mean loss of the questions as it was before."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for question in questions:
        loss = target_loss(model, question) / len(questions)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total
