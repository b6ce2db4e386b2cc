"""Parts of the last residual stream times the unembedding; queries of a stream without some heads."""

import itertools

import numpy as np
import torch
from plain_transformers import hooked, interval, open_plain, width

model, tokenizer = open_plain("smollm2-135m")
texts, right, wrong = [], [], []
for first, second in itertools.permutations(["Mary", "John", "Tom", "James"], 2):
    for giver, other in ((first, second), (second, first)):
        texts.append(f"When {first} and {second} went to the store, {giver} gave a drink to")
        right.append(tokenizer.encode(f" {other}")[-1])
        wrong.append(tokenizer.encode(f" {giver}")[-1])
right, wrong = torch.tensor(right), torch.tensor(wrong)
ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # no token sees those behind it
last = torch.tensor([len(some) - 1 for some in ids])
heads, d_head = model.config.num_attention_heads, width(model)
layers, norm, unembedding = model.model.layers, model.model.norm, model.lm_head.weight


@torch.no_grad()
def recorded(count: int):
    """A pass of the first prompts: outputs of heads and MLPs, and arguments of layers."""
    moved, mlps, stream, called = [], [], [], []
    handles = [
        one.register_forward_pre_hook(
            lambda _, given, named: (stream.append(given[0]), called.append(named))[2:] or None,
            with_kwargs=True,
        )
        for one in layers
    ]
    with hooked(
        *((one.self_attn.o_proj, lambda _, given, __: moved.append(given[0])) for one in layers),
        *((one.mlp, lambda _, __, output: mlps.append(output)) for one in layers),
        (norm, lambda _, given, __: stream.append(given[0])),
    ):
        model(tokens[:count], use_cache=False)
    for handle in handles:
        handle.remove()
    return moved, mlps, stream, called


@torch.no_grad()
def difference(stream: torch.Tensor) -> np.ndarray:
    """Logit of the right name minus that of the wrong one, from the last stream of prompts."""
    rows = torch.arange(len(stream))
    logits = model.lm_head(norm(stream[rows, last[: len(stream)]]))
    found = logits[rows, right[: len(stream)]] - logits[rows, wrong[: len(stream)]]
    return found.double().numpy()


def written(moved: list[torch.Tensor], layer: int, head: int) -> torch.Tensor:
    """Contribution of a head to the stream [prompt, token, d_model]."""
    some = slice(head * d_head, (head + 1) * d_head)
    return moved[layer][..., some] @ layers[layer].self_attn.o_proj.weight[:, some].T


moved, mlps, stream, _ = recorded(len(texts))
plain, rows = difference(stream[-1]), torch.arange(len(texts))
with torch.no_grad():
    factor = torch.rsqrt(
        (stream[-1][rows, last] ** 2).mean(-1, keepdim=True) + norm.variance_epsilon
    )
    along = (norm.weight * factor * (unembedding[right] - unembedding[wrong])).double()

    def added(part: torch.Tensor) -> np.ndarray:
        """Contribution of a part of the stream to the difference of each prompt."""
        return (part[rows, last].double() * along).sum(-1).numpy()

    of_heads = np.array(
        [[added(written(moved, a, b)) for b in range(heads)] for a in range(len(layers))]
    )  # [layer, head, prompt]
    of_mlps, of_embedding = sum(map(added, mlps)), added(stream[0])
means = of_heads.mean(-1)
largest = np.argsort(-np.abs(means), axis=None, kind="stable")[:3]
named = ", ".join(
    "L{} H{} {:+.2f} [{:+.2f}, {:+.2f}]".format(layer, head, *interval(of_heads[layer, head]))
    for layer, head in (divmod(int(place), heads) for place in largest)
)
print("The logit difference is {:+.2f} [{:+.2f}, {:+.2f}]".format(*interval(plain)), end=", ")
print(f"mean over {len(texts)} prompts; the largest parts of single heads are {named}; ", end="")
print(f"all together: heads {means.sum():+.2f}, MLPs {of_mlps.mean():+.2f}, ", end="")
print(f"embedding {round(float(of_embedding.mean()), 2) + 0.0:+.2f}, biases +0.00")

layer, head = divmod(int(means[1:].argmax()) + heads, heads)
receiver = layers[layer]
moved, _, stream, called = recorded(6)


@torch.no_grad()
def without(*senders: tuple[int, int]) -> np.ndarray:
    """Change by prompt if the receiver's queries read a stream without some heads."""
    entered = stream[layer]
    rest = receiver.input_layernorm(entered - sum(written(moved, *sender) for sender in senders))

    def queries(module, given, output):
        some = slice(head * d_head, (head + 1) * d_head)
        output = output.clone()
        output[..., some] = rest @ module.weight[some].T
        return output

    with hooked((receiver.self_attn.q_proj, queries)):
        for block in layers[layer:]:  # those below see nothing of it
            entered = block(entered, **called[layer])
    return difference(entered) - plain[:6]


paths = {(one, number): without((one, number)) for one in range(layer) for number in range(heads)}
strongest = sorted(paths, key=lambda one: paths[one].mean())[:3]
listed = {f"L{a} H{b}": round(float(paths[a, b].mean()), 2) for a, b in strongest}
print(f"without a path into the queries of L{layer} H{head}: {listed}")
print("without all three:", *(f"{value:+.2f}" for value in interval(without(*strongest))))
