// What all modules of our pages use: elements, texts that can be seen, numbers as they are shown, and packed arrays.
"use strict";

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const button = (text, act, properties = {}) => el("button", { type: "button", textContent: text, onclick: act, ...properties });
export const field = (text, control) => el("label", {}, text + " ", control);
export const option = (value, text) => el("option", { value, textContent: text });
export const nameOf = ([layer, head]) => "L" + layer + " H" + head;
export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

const UNSEEN = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

// The text of a token with everything visible that a screen would not show.
export function visible(text) {
  if (text === "") return "∅";
  return Array.from(text, (character) => {
    if (character in UNSEEN) return UNSEEN[character];
    if (!/[\p{C}\p{Z}]/u.test(character)) return character;
    return "\\u" + character.codePointAt(0).toString(16).padStart(4, "0");
  }).join("");
}

// The same within a text, where a space between words is one.
export const readable = (text) => (text.trim() ? text.split(" ").map((part) => part && visible(part)).join(" ") : visible(text));

// The same for Plotly, which reads some tags in its texts.
export function written(text, most = 24) {
  const seen = visible(text);
  return (seen.length > most ? seen.slice(0, most - 1) + "…" : seen).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

export const number = (value, digits = 4) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(2) : String(Number(value.toPrecision(digits))));

// A share in percent; one that is too small to matter is not told from 0 by its digits.
export const percent = (share) => (share === null ? "–" : Math.abs(share) < 1e-5 ? (share ? "< 0.001" : "0") : String(Number((100 * share).toPrecision(3))));

const dark = matchMedia("(prefers-color-scheme: dark)");

// A colour of a scheme as it can be seen on the page: lighter on dark paper.
export function ink(hex) {
  if (!dark.matches) return hex;
  const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  return "#" + parts.map((part) => Math.round(part + 0.4 * (255 - part)).toString(16).padStart(2, "0")).join("");
}

// The bytes of base64. A function that is called for each of plotly's two million takes a fifth of the time in which a page opens.
export function bytesOf(base64) {
  const binary = atob(base64), bytes = new Uint8Array(binary.length);
  for (let place = 0; place < bytes.length; place++) bytes[place] = binary.charCodeAt(place);
  return bytes;
}

// Base64 of compressed text as that text.
export const inflated = (base64) => new Response(new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"))).text();

// Base64 as numbers that are read one by one; each text is decoded once.
const decoded = new Map();
export function packedNumbers(text) {
  if (!decoded.has(text)) decoded.set(text, new DataView(bytesOf(text).buffer));
  return decoded.get(text);
}

export const finite = (value) => (Number.isFinite(value) ? value : null);

// Whether two lists of ranges [first, last] of tokens and one token meet.
export const holds = (ranges, token) => ranges.some(([first, last]) => first <= token && token <= last);
