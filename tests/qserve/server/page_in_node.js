// Runs the script of the chat page in Node, with the few parts of a browser that it uses, against a
// server. Arguments: the page's file, the server's address, messages to send. Prints what is shown.
"use strict";
const fs = require("fs");
const [file, address, ...texts] = process.argv.slice(2);

class Element {
  constructor() {
    Object.assign(this, {value: "", textContent: "", className: "", children: [], listeners: {}});
  }
  append(...children) {
    for (const each of children) each.parent = this;
    this.children.push(...children);
  }
  get lastChild() { return this.children.at(-1); }
  replaceChildren(...children) { this.children = children; if (children[0]) this.value = children[0].value; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  scrollIntoView() {}
  requestSubmit() { this.listeners.submit({preventDefault() {}}); }
}
class Text {
  constructor(data) { this.data = data; }
  before(other) { this.parent.children.splice(this.parent.children.indexOf(this), 0, other); }
}
const elements = {};
globalThis.document = {
  getElementById: (id) => (elements[id] ??= new Element()),
  createElement: () => new Element(),
  createTextNode: (data) => new Text(data),
};
globalThis.Option = class { constructor(value) { this.value = value; } };
const plain = globalThis.fetch;
globalThis.fetch = (path, options) => plain(address + path, options);

const script = fs.readFileSync(file, "utf8").match(/<script>([\s\S]*?)<\/script>/)[1];
(0, eval)(script.replace('"use strict";', "") + "\nglobalThis.state = () => ({messages, running});");

const until = async (holds) => {
  for (let i = 0; i < 2000 && !holds(); i++) await new Promise((done) => setTimeout(done, 10));
  if (!holds()) throw new Error("waited too long");
};
(async () => {
  await until(() => document.getElementById("status").textContent !== "");
  for (const text of texts) {
    if (text.startsWith("--")) {
      const [name, value] = text.slice(2).split("=");
      document.getElementById(name).value = value;
      continue;
    }
    document.getElementById("text").value = text;
    document.getElementById("form").requestSubmit();
    await until(() => !state().running);
  }
  const turns = document.getElementById("talk").children.map((turn) => ({
    kind: turn.className,
    text: turn.textContent + turn.children.map((each) => each.data ?? "").join(""),
    facts: turn.children.filter((each) => each.className == "facts").map((each) => each.textContent),
    reasoning: turn.children.filter((each) => each.className == "reasoning").map((each) => each.lastChild.data),
  }));
  console.log(JSON.stringify({
    status: document.getElementById("status").textContent, models: document.getElementById("model").children.map((each) => each.value),
    turns, messages: state().messages,
  }));
})();
