// The explorer, and where the reader compares, a second one at its side: another prompt of the same checkpoint, which shows the same heads,
// or another checkpoint over the same text, which shows the same heads and token. Each side has edits of its own.
import { el } from "./dom.js";
import { explore } from "./explorer.js";
import { link } from "./link.js";

// `sourceOf(model)`: a source of answers of a checkpoint by its number; 0 is the first. What stands at the side is in the first one's state,
// as its number and what is chosen there alone.
export function sides(root, sourceOf, addressed = true) {
  let side = null;
  const lead = explore(root, sourceOf(0), { addressed, compare });

  function compare(wanted) {
    if (wanted ? side && wanted.model === side.model : !side) return;
    if (side) {
      side.ended.abort();
      side.source.close();
      side.root.remove();
      side = null;
    }
    root.parentElement.classList.toggle("two", Boolean(wanted));
    if (wanted) show(wanted);
    // plotly fits its charts to their element on this event
    window.dispatchEvent(new Event("resize"));
  }

  async function show({ model, ...first }) {
    const mine = (side = { model, root: el("section", { className: "explorer", "aria-label": "Compared" }), source: sourceOf(model), ended: new AbortController() });
    root.after(mine.root);
    const explored = explore(mine.root, mine.source, { addressed: false, first });
    await Promise.all([lead.ready, explored.ready]);
    // The reader may have closed or changed the side while it loaded
    if (side !== mine) return;
    // Another prompt has other tokens, so only heads are followed there
    const linked = ({ heads, ...chosen }) => (model ? { heads, ...chosen } : { heads });
    const ends = [lead, explored].map((one) => ({ ...one, follow: (chosen) => one.follow(linked(chosen)) }));
    explored.events.addEventListener("drawn", () => {
      const { prompt, text, edits } = explored.state();
      lead.arrange({ against: { model, ...(model ? {} : { prompt, text }), edits } }, () => {});
    }, { signal: mine.ended.signal });
    await link(ends, mine.ended.signal);
  }
}
