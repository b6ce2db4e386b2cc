// The source of answers of a page without a model: what a run holds, in the form in which a session answers. It computes nothing but the
// softmax of logits that were kept as block means.
import { finite, packedNumbers } from "./dom.js";
import { differing } from "./map.js";

const MOST_AROUND = 4000; // points of all tokens in the chart of logits by distance
const NOTHING = 65535; // a cell of an image without a value
// By what a finding is about: whether `key` is such a key for `token`.
const LOOKS_AT = {
  "after a copy": (texts, key, token) => key > 0 && key <= token && texts[token] !== undefined && texts[key - 1] === texts[token] && key - 1 < token && /\w/.test(texts[token]),
  copy: (texts, key, token) => key < token && texts[key] !== undefined && texts[key] === texts[token],
  previous: (texts, key, token) => key === token - 1 && key > 0,
  first: (texts, key, token) => key === 0 && token > 0,
};
const refused = (line) => Object.assign(new Error(line), { refused: true });
const nearest = (tokens, token) => tokens.reduce((best, one) => (Math.abs(one - token) < Math.abs(best - token) ? one : best));

// The place of a head in what a chart holds of every head; null where it has none.
export function placeIn(chart, [layer, head]) {
  const row = chart.layers.findIndex((one) => one.layer === layer), column = chart.heads.indexOf(head);
  return row < 0 || column < 0 ? null : { row, column, place: row * chart.heads.length + column, colour: chart.layers[row].colour };
}

// A cell of an image of block means.
export function cellOf(chart, own, row, column) {
  const level = packedNumbers(chart.values).getUint16(2 * ((own.place * chart.rows + row) * chart.columns + column), true);
  return level === NOTHING ? null : chart.low[own.row][own.column] + (chart.spread[own.row][own.column] * level) / (NOTHING - 1);
}

export class StoredSource {
  // What a reader does to get a model's answers.
  how = "Edits, your own text and Python code need the model: repo-interp explore RUN, with the directory or the run.nc of this run, opens this page with it.";

  // `data`: positions and texts; `charts`: of all heads, rows of attention, logits of pairs and next tokens among them; `maps`: scores.
  constructor(data, charts, maps) {
    Object.assign(this, { data, maps });
    const of = (kind) => charts.find((chart) => chart.kind === kind);
    this.rows = of("rows");
    this.next = of("next");
    this.named = data.bare && maps.find((map) => map.meanings); // what heads are, for a first look
    this.logits = charts.filter((chart) => chart.causal_logits);
  }

  async ask(message) {
    return this[message.ask](message);
  }

  open() {
    const { layers, heads, prompts, order, bare } = this.data;
    return {
      checkpoint: "", layers: layers.map((layer) => ({ ...layer, heads: heads.length })), heads, head_table: null, reads_text: false, bare: Boolean(bare),
      prompts: prompts.map((prompt) => prompt.count), numbers: prompts.map((prompt) => prompt.prompt), ranked: order,
    };
  }

  prompt({ prompt: place }) {
    const { layers, heads, spans, start, bare } = this.data, prompt = this.promptAt(place);
    const generated = prompt.spans.generated, last = generated ? Math.max(0, generated[0][0] - 1) : prompt.count - 1;
    const blocks = layers.map((layer) => prompt.layers[layer.layer] || prompt.outlines[layer.layer]);
    const best = !bare ? this.maps[0] : this.named || this.maps.reduce((best, map) => (differing(map) > differing(best) ? map : best), this.maps[0]);
    // Positions that are the token index are one line in all heads, which tells nothing
    const byIndex = layers.map(({ layer }, row) => heads.map((_, head) => !bare && Boolean(prompt.layers[layer]) && valuesOf(blocks[row])[blocks[row].row[head]].every((value, token) => value === token)));
    const shown = start.length ? start : [[layers[layers.length - 1].layer, heads[0]]], kept = this.rowsOf(prompt);
    return {
      tokens: prompt.texts || Array.from({ length: prompt.count }, (_, token) => String(token)), joint: prompt.texts ? prompt.joint : " ", texts: prompt.texts !== null,
      spans: Object.fromEntries(Object.entries(prompt.spans).map(([name, at]) => [name, { at, colour: name === "rest" ? null : spans[name].colour }])),
      answer: (generated || []).flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, place) => first + place)), start: 0, token: kept ? nearest(kept.queries, last) : last, heads: {
        maps: this.maps, prompt: prompt.prompt, outlines: bare ? null : blocks.map((block, row) => heads.map((_, head) => block && !byIndex[row][head] && valuesOf(block)[block.row[head]])), by_index: byIndex,
        alike: blocks.map((block, row) => !bare && Boolean(block) && !byIndex[row][0] && block.row.every((row) => row === block.row[0]) && block.global[0] !== null),
      },
      head: shown[0], shown, score: best ? best.title : "",
    };
  }

  view({ prompt: place, heads, token, selection, looking }) {
    const prompt = this.promptAt(place), known = heads.filter(([layer, head]) => this.data.layers.some((one) => one.layer === layer) && this.data.heads.includes(head));
    if (!heads.length || known.length < heads.length) throw refused("this run has no such head; choose one in the map");
    const rows = heads.map(([layer, head]) => {
      const block = prompt.layers[layer];
      if (!block) return { values: [], missing: "left out of this page", global: null, focused: null };
      const row = block.row[this.data.heads.indexOf(head)];
      return { values: this.data.bare ? [] : valuesOf(block)[row], missing: "no positions in this layer", global: block.global[row], focused: block.focused[row] };
    });
    const looks = heads.map((pair) => this.looks(prompt, pair, token)), kept = this.rowsOf(prompt);
    const instead = this.instead(prompt, token), after = instead ? this.after(instead.prompt, instead.token) : this.after(prompt.prompt, token);
    const dense = (name) => looks.map((row) => (row ? row[name] : []));
    return {
      numbers: {
        position: { dims: ["shown", "token"], values: rows.map((row) => row.values) }, weight: { dims: ["shown", "key"], values: dense("weight") }, logit: { dims: ["shown", "key"], values: dense("logit") },
        ...(after && { probability: { dims: ["rank"], values: after.probability }, next_text: { dims: ["rank"], values: after.text } }),
      },
      ranges: rows.map(({ global, focused, missing }) => ({ global, focused, missing })), sentences: [], heads: null, sizes: looks.map((row) => (row ? row.size : 1)),
      around: kept ? heads.map((pair) => this.around(prompt, pair, kept)) : null,
      missing: looks[0] ? null : this.missing(prompt, heads[0]), near: !looks[0] && kept && placeIn(this.rows, heads[0]) ? nearest(kept.queries, token) : null,
      looking: selection ? this.looking(prompt, selection, looking === "answer" ? this.prompt({ prompt: place }).answer.map((one) => one - 1) : [token], heads[0]) : null,
      following: after ? after.following : null, unexpected: this.next ? null : "This run has no predictions of next tokens: analyze again with the measure " + this.data.measures.next + ".", instead, kept: this.rows ? "the strongest keys" : null,
    };
  }

  // The numbers that are drawn as CSV, with the columns of a session's.
  csv({ prompt: place, heads, token }) {
    const { numbers } = this.view({ prompt: place, heads, token }), cell = (values, at) => values[at] ?? "";
    const rows = heads.flatMap(([layer, head], shown) => Array.from({ length: this.promptAt(place).count }, (_, at) => [shown, at, cell(numbers.position.values[shown], at), layer, head, cell(numbers.weight.values[shown], at), cell(numbers.logit.values[shown], at)]));
    return { name: "explored.csv", base64: btoa([["shown", "token", "position", "layer", "head", "weight", "logit"], ...rows].map((row) => row.join(",") + "\n").join("")) };
  }

  promptAt(place) {
    const prompt = this.data.prompts[place];
    if (!prompt) throw refused("this page has no prompt of this number");
    return prompt;
  }

  // The rows of attention of a prompt; null where there are none.
  rowsOf(prompt) {
    return (this.rows && this.rows.prompts.find((rows) => rows.prompt === prompt.prompt)) || null;
  }

  // Where a head looks from a token: weights and logits by key, null where they are not kept.
  looks(prompt, pair, token) {
    const kept = this.rowsOf(prompt), own = kept && placeIn(this.rows, pair), query = own ? kept.queries.indexOf(token) : -1;
    if (query >= 0) return this.strongest(prompt, own, kept, query);
    const chart = this.logits.find((one) => one.prompt === prompt.prompt && placeIn(one, pair) && token < one.tokens);
    return chart ? this.estimated(prompt, chart, placeIn(chart, pair), token) : null;
  }

  // Attention of all heads to tokens `first` to `last`, mean over the rows of `tokens` that are kept: at least `clean`, and at most `most`, as
  // a key that is not kept has no more than the least of those that are.
  looking(prompt, [first, last], tokens, pair) {
    const kept = this.rowsOf(prompt), places = kept ? tokens.map((token) => kept.queries.indexOf(token)).filter((place) => place >= 0) : [];
    if (!places.length) return { clean: null, rows: 0, of: tokens.length, missing: this.missing(prompt, pair) };
    const { ranks, queries } = kept, weights = packedNumbers(kept.weights), keys = packedNumbers(kept.keys);
    const ends = ({ place }) => {
      let low = 0, high = 0;
      for (const query of places) {
        let inside = 0, held = 0, least = 1, whole = false, known = 0;
        for (let rank = 0; rank < ranks; rank++) {
          const cell = (place * queries.length + query) * ranks + rank, key = keys.getInt32(4 * cell, true);
          if (key < 0) { whole = true; continue; } // the row sees no more keys
          const weight = Math.exp(this.logarithm(weights.getUint16(2 * cell, true)));
          held += weight;
          least = Math.min(least, weight);
          if (first <= key && key <= last) { inside += weight; known += 1; }
        }
        const others = whole ? 0 : Math.max(0, Math.min(last, queries[query]) - first + 1) - known;
        low += inside / places.length;
        high += (inside + Math.min(Math.max(0, 1 - held), others * least)) / places.length;
      }
      return [low, high];
    };
    const all = this.data.layers.map(({ layer }) => this.data.heads.map((head) => placeIn(this.rows, [layer, head])).map((own) => (own ? ends(own) : [null, null])));
    const end = (which) => all.map((row) => row.map((ends) => (Number.isNaN(ends[which]) ? null : ends[which])));
    return { clean: end(0), most: end(1), rows: places.length, of: tokens.length };
  }

  // The logarithm of a packed weight.
  logarithm(level) {
    return this.rows.least * (1 - level / (NOTHING - 1));
  }

  strongest(prompt, own, kept, query) {
    const { queries, ranks } = kept, row = own.place * queries.length + query;
    const weights = packedNumbers(kept.weights), keys = packedNumbers(kept.keys), total = packedNumbers(kept.totals).getFloat32(4 * row, true);
    const weight = Array(prompt.count).fill(null), logit = Array(prompt.count).fill(null);
    for (let rank = 0; rank < ranks; rank++) {
      const cell = row * ranks + rank, key = keys.getInt32(4 * cell, true);
      if (key < 0) continue;
      const logarithm = this.logarithm(weights.getUint16(2 * cell, true));
      weight[key] = Math.exp(logarithm);
      logit[key] = total + logarithm;
    }
    return { weight, logit, size: 1 };
  }

  // Distances and logits of the strongest keys of all kept tokens.
  around(prompt, pair, kept) {
    const own = placeIn(this.rows, pair), x = [], y = [], step = Math.ceil((kept.queries.length * kept.ranks) / MOST_AROUND);
    for (let query = 0; own && query < kept.queries.length; query += step) {
      this.strongest(prompt, own, kept, query).logit.forEach((value, key) => {
        if (value === null) return;
        x.push(kept.queries[query] - key);
        y.push(value);
      });
    }
    return { x, y };
  }

  // The softmax of the row of block means, each as often as it has visible keys.
  estimated(prompt, chart, own, token) {
    const row = Math.floor(token / chart.size), logit = Array(prompt.count).fill(null);
    for (let key = 0; key <= token && Math.floor(key / chart.size) < chart.columns; key++) logit[key] = cellOf(chart, own, row, Math.floor(key / chart.size));
    const known = logit.filter((value) => value !== null);
    if (!known.length) return null;
    const most = known.reduce((one, other) => Math.max(one, other)), total = known.reduce((sum, value) => sum + Math.exp(value - most), 0);
    return { logit, weight: logit.map((value) => (value === null ? null : Math.exp(value - most) / total)), size: chart.size };
  }

  missing(prompt, pair) {
    const kept = this.rowsOf(prompt), prompts = this.rows ? this.rows.prompts.map((rows) => rows.prompt) : [];
    if (this.rows && !kept) return "This page has the attention of tokens only for prompt" + (prompts.length > 1 ? "s " : " ") + prompts.join(", ") + ".";
    if (this.rows && !placeIn(this.rows, pair)) return "The attention of tokens was not measured for this head.";
    if (kept) return (kept.queries.length < kept.kept ? "This page has room for" : "The run keeps") + " the rows of " + kept.queries.length + " tokens.";
    if (this.logits.length) return "The run has attention only for prompt " + this.logits[0].prompt + ", and for the heads of the logit maps.";
    return "This run has no attention of tokens: analyze again with the measure " + this.data.measures.rows + ".";
  }

  // The prompt and the token in which a head looks most at the keys that a finding is about; null where no row of it is kept.
  telling([layer, head], looksAt, prompts = null) {
    const shows = LOOKS_AT[looksAt], own = this.rows && placeIn(this.rows, [layer, head]);
    let best = null;
    for (const kept of own && shows ? this.rows.prompts : []) {
      const prompt = this.data.prompts.find((one) => one.prompt === kept.prompt);
      if (!prompt || (prompts && !prompts.includes(kept.prompt))) continue;
      kept.queries.forEach((token, query) => {
        const { weight } = this.strongest(prompt, own, kept, query), texts = prompt.texts || [];
        const share = weight.reduce((sum, value, key) => (value && shows(texts, key, token) ? sum + value : sum), 0);
        if (!best || share > best.share) best = { prompt: kept.prompt, token, share };
      });
    }
    return best && best.share ? { prompt: best.prompt, token: best.token } : null;
  }

  // Where next tokens are kept, if not after this token: after the nearest one, or in the prompt that has them before its answer.
  instead(prompt, token) {
    if (!this.next || this.after(prompt.prompt, token)) return null;
    const place = this.data.prompts.findIndex((one) => one.prompt === this.next.prompt), here = this.next.prompt === prompt.prompt;
    return { prompt: this.next.prompt, token: nearest(this.next.tokens, here || place < 0 ? token : this.prompt({ prompt: place }).token) };
  }

  after(prompt, token) {
    const row = this.next && this.next.prompt === prompt ? this.next.tokens.indexOf(token) : -1;
    return row < 0 ? null : { probability: this.next.probabilities[row], text: this.next.texts[row], following: this.next.following[row] };
  }
}

// The rows of a block of positions, each once.
const unpacked = new Map();
function valuesOf(block) {
  if (!unpacked.has(block)) {
    const numbers = packedNumbers(block.values), rows = Math.max(...block.row) + 1, count = numbers.byteLength / 4 / rows;
    unpacked.set(block, Array.from({ length: rows }, (_, row) => Array.from({ length: count }, (_, token) => finite(numbers.getFloat32(4 * (row * count + token), true)))));
  }
  return unpacked.get(block);
}
