"""Parts of the last residual stream times the unembedding; a layer that runs twice for a path."""

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
d_head, heads = width(model), model.config.num_attention_heads
layers, norm, unembedding = model.model.layers, model.model.norm, model.lm_head.weight
prompts = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]


@torch.no_grad()
def parts(tokens: torch.Tensor, direction: torch.Tensor) -> tuple[np.ndarray, ...]:
    """What heads [layer, head], MLPs [layer] and the embedding add along a direction."""
    outputs, mlps, embedded, stream = [], [], [], []
    with hooked(
        *((one.self_attn.o_proj, lambda _, given, __: outputs.append(given[0][0, -1])) for one in layers),
        *((one.mlp, lambda _, __, output: mlps.append(output[0, -1])) for one in layers),
        (model.model.embed_tokens, lambda _, __, output: embedded.append(output[0, -1])),
        (norm, lambda _, given, __: stream.append(given[0][0, -1])),
    ):
        model(tokens)
    factor = torch.rsqrt((stream[0] ** 2).mean() + norm.variance_epsilon)
    along = norm.weight * factor * direction
    written = torch.stack(
        [
            (output.unflatten(0, (heads, -1)) * (along @ one.self_attn.o_proj.weight).unflatten(0, (heads, -1))).sum(-1)
            for output, one in zip(outputs, layers, strict=True)
        ]
    )
    whole = written.double(), torch.stack(mlps).double() @ along.double(), embedded[0] @ along
    return tuple(part.numpy() for part in whole)


directions = unembedding[right] - unembedding[wrong]
of_heads, of_mlps, of_embedding = (
    np.stack(part)
    for part in zip(*(parts(a, b) for a, b in zip(prompts, directions.detach(), strict=True)), strict=True)
)


@torch.no_grad()
def difference(number: int) -> float:
    """Logit of the right name less that of the wrong one."""
    logits = model(prompts[number]).logits[0, -1]
    return float(logits[right[number]] - logits[wrong[number]])


plain = np.array([difference(number) for number in range(len(texts))])
means = of_heads.mean(0)
largest = np.argsort(-np.abs(means), axis=None, kind="stable")[:3]
named = ", ".join(
    "L{} H{} {:+.2f} [{:+.2f}, {:+.2f}]".format(layer, head, *interval(of_heads[:, layer, head]))
    for layer, head in (divmod(int(place), heads) for place in largest)
)
print(
    "The logit difference is {:+.2f} [{:+.2f}, {:+.2f}]".format(*interval(plain))
    + f", mean over {len(texts)} prompts; the largest parts of single heads are {named}; all together: "
    + f"heads {means.sum():+.2f}, MLPs {of_mlps.mean(0).sum():+.2f}, "
    + f"embedding {round(float(of_embedding.mean()), 2) + 0.0:+.2f}, biases +0.00"
)
layer, head = divmod(int(means[1:].argmax()) + heads, heads)
receiver = layers[layer]


def without(*senders: tuple[int, int]) -> np.ndarray:
    """Change by six prompts where the receiver's queries read a stream without these heads."""
    wrote: list[torch.Tensor] = []

    def send(module, given, output, number):
        start = number * d_head
        some = given[0][..., start : start + d_head]
        wrote.append(some @ module.weight[:, start : start + d_head].T)

    entered: list[torch.Tensor] = []

    def queries(module, given, output):
        stream = receiver.input_layernorm(entered[-1] - sum(wrote[-len(senders) :]))
        changed = output.clone()
        some = slice(head * d_head, (head + 1) * d_head)
        changed[..., some] = stream @ module.weight[some].T
        return changed

    enters = receiver.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    with hooked(
        *(
            (layers[one].self_attn.o_proj, lambda *given, number=number: send(*given, number))
            for one, number in senders
        ),
        (receiver.self_attn.q_proj, queries),
    ):
        found = np.array([difference(number) for number in range(6)])
    enters.remove()
    return found - plain[:6]


paths = {(one, number): without((one, number)) for one in range(layer) for number in range(heads)}
strongest = sorted(paths, key=lambda one: paths[one].mean())[:3]
listed = {f"L{a} H{b}": round(float(paths[a, b].mean()), 2) for a, b in strongest}
print(f"without a path into the queries of L{layer} H{head}: {listed}")
print("without all three:", *(f"{value:+.2f}" for value in interval(without(*strongest))))
