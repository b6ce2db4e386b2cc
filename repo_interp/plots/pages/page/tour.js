// Five steps that say how the explorer is read, each inside the part that it speaks of. Esc and "Close" leave it at any step.
import { button, el } from "./dom.js";

const STEP_HEADS = ["Heads", "A tile is a head of a layer, colored by a score. Click a tile: every chart then shows this head."];
const STEP_TOKEN = ["Prompt", "Click a token. Below the text you read where the head looks from it. Drag over tokens: every head is colored by its attention to them."];
const STEP_WEIGHTS = ["Attention of the chosen token", "A bar per token: the share of attention that the chosen token gives it. The dotted line is the chosen token."];
const STEPS_LIVE = [STEP_HEADS, STEP_TOKEN, STEP_WEIGHTS,
  ["Edits", "Click the first suggestion. It takes from some heads the positions that the answer needs; Undo gives them back."],
  ["Continuation", "The model goes on as it is, and below it under your edits. Green is right, red is wrong."]];
const STEPS_STORED = [STEP_HEADS, STEP_TOKEN, STEP_WEIGHTS,
  ["Logits by distance", "Attention before the softmax, by how far away a token is. A slope shows that the head prefers near tokens, or far ones."],
  ["Edits", "This page holds what was measured. With the command here the same page edits positions, and the model answers again."]];

// The button that starts the steps in `root`; `stored`: whether no model answers.
export function tour(root, stored) {
  const start = button("Show me in five steps", () => step(0), { className: "tour-start" });
  let card = null;

  function leave() {
    if (!card) return;
    card.closest("section").classList.remove("taught");
    card.remove();
    card = null;
    start.focus();
  }

  function step(place) {
    const steps = stored ? STEPS_STORED : STEPS_LIVE, [name, says] = steps[place], next = button(place + 1 < steps.length ? "Next" : "Done", () => (place + 1 < steps.length ? step(place + 1) : leave()));
    const section = root.querySelector('section[aria-label="' + name + '"]');
    leave();
    card = el("aside", { className: "tour", role: "dialog", "aria-label": "Step " + (place + 1) + " of " + steps.length },
      el("p", { textContent: place + 1 + " of " + steps.length + ". " + (section.hidden ? name + ": this run keeps nothing for this chart. " : "") + says }), button("Back", () => step(place - 1), { disabled: !place, title: place ? "" : "This is the first step" }), " ", next, " ", button("Close", leave, { title: "Esc" }));
    const shown = section.hidden ? root.querySelector('section[aria-label="Prompt"]') : section;
    shown.prepend(card);
    shown.classList.add("taught");
    shown.scrollIntoView({ block: "nearest" });
    next.focus({ preventScroll: true });
  }

  root.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  return start;
}
