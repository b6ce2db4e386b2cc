// Where answers come from: the server of `repo-interp explore`, or the kernel of a notebook. Both take the same messages.
import { sides } from "./sides.js";

const AGAIN = 1000; // milliseconds between two tries to reach a server that is gone

export class Refused extends Error {
  refused = true;
}

// Asks the server that this page came from. `onLost` and `onFound` are called when it is gone, and when it is back.
export class HttpSource {
  // `model`: the number of a checkpoint.
  constructor(model) {
    this.model = model;
    // The server ends older views of one page by this name, and leaves other pages alone
    this.tab = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    this.lost = false;
    this.onLost = this.onFound = () => {};
  }

  // The answer; null where a newer message of this page took its place, or the server is gone.
  async ask(message) {
    const response = await this.send(message);
    const answer = response && (await response.json());
    if (answer && answer.refused) throw new Refused(answer.refused);
    return answer && !answer.superseded ? answer : null;
  }

  // Hands every event to `take`, until the last one or until `signal` is aborted.
  async events(message, take, signal) {
    const response = await this.send(message, signal);
    if (!response) return;
    if (!response.headers.get("content-type").startsWith("text/event-stream")) throw new Refused((await response.json()).refused);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        // A part of the stream may end within an event: its beginning waits for the next part
        const lines = (waiting + part.value).split("\n\n");
        waiting = lines.pop();
        for (const line of lines) {
          const event = JSON.parse(line.slice("data: ".length));
          if (event.refused) throw new Refused(event.refused);
          if (!event.done) take(event);
        }
      }
    } catch (error) {
      if (error instanceof Refused) throw error;
      if (!signal.aborted) this.lose();
    }
  }

  async send(message, signal) {
    try {
      return await fetch("ask", { method: "POST", body: JSON.stringify({ ...message, model: this.model, tab: this.tab }), signal });
    } catch {
      if (!signal || !signal.aborted) this.lose();
      return null;
    }
  }

  close() {
    this.closed = true;
  }

  lose() {
    if (this.lost || this.closed) return;
    this.lost = true;
    this.onLost();
    const again = async () => {
      try {
        // A server that was started again keeps its token, so that the same address finds it
        const response = await fetch("ask", { method: "POST", body: JSON.stringify({ ask: "open" }) });
        if (!response.ok) throw new Error(String(response.status));
        this.lost = false;
        this.onFound();
      } catch {
        setTimeout(again, AGAIN);
      }
    };
    setTimeout(again, AGAIN);
  }
}

let sent = 0; // messages to the kernel; several sources share its answers

// Asks the kernel of a notebook by messages of an anywidget. Of a stream each event is asked for, so that it can be stopped.
export class KernelSource {
  constructor(widget, model = 0) {
    Object.assign(this, { widget, model });
    this.waiting = new Map();
    this.newest = null;
    this.onLost = this.onFound = () => {};
    this.receive = ({ number, answer }) => {
      const resolve = this.waiting.get(number);
      this.waiting.delete(number);
      if (resolve) resolve(answer);
    };
    widget.on("msg:custom", this.receive);
  }

  send(message) {
    const number = ++sent;
    return new Promise((resolve) => {
      this.waiting.set(number, resolve);
      this.widget.send({ number, message });
    });
  }

  async ask(message) {
    const mine = message.ask === "view" ? (this.newest = {}) : null;
    const answer = await this.send({ ...message, model: this.model });
    // A newer view was asked for meanwhile, as `superseded` of the server says it
    if (mine && this.newest !== mine) return null;
    if (answer.refused) throw new Refused(answer.refused);
    return answer;
  }

  async events(message, take, signal) {
    for (let answer = await this.send({ ...message, model: this.model }); !answer.done && !signal.aborted; answer = await this.send({ more: answer.stream })) {
      if (answer.refused) throw new Refused(answer.refused);
      take(answer.event);
    }
  }

  close() {
    this.widget.off("msg:custom", this.receive);
  }
}

if (document.body && document.body.dataset.explorer === "http") sides(document.getElementById("explorer"), (model) => new HttpSource(model));
