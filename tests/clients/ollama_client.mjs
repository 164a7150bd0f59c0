import { Ollama } from "ollama";

const [client, embeds, sees] = process.argv.slice(2, 5).map((host) => new Ollama({ host }));
const asked = { model: "fake" };
const hello = [{ role: "user", content: "hello" }];
console.log((await client.chat({ ...asked, messages: hello })).message.content);
let text = "";
for await (const part of await client.chat({ ...asked, messages: hello, stream: true })) {
  text += part.message.content;
}
console.log(text);
const tools = [
  {
    type: "function",
    function: {
      name: "look_up",
      description: "What a word means.",
      parameters: { type: "object", properties: { word: { type: "string" } }, required: ["word"] },
    },
  },
];
const messages = [{ role: "user", content: "What is heliotrope?" }];
const { message } = await client.chat({ ...asked, messages, tools });
const results = message.tool_calls.map(({ function: { name, arguments: given } }) => ({
  role: "tool",
  tool_name: name,
  content: `${given.word} is a flower`,
}));
console.log((await client.chat({ ...asked, messages: [...messages, message, ...results], tools })).message.content);
const schema = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
const held = await client.chat({ ...asked, messages: [{ role: "user", content: "json" }], format: schema });
console.log(JSON.parse(held.message.content).a);
const thought = await client.generate({ ...asked, prompt: "think", think: true });
console.log(thought.thinking, thought.response);
const images = [process.argv[5]];
console.log((await sees.chat({ ...asked, messages: [{ role: "user", content: "see", images }] })).message.content);
console.log((await embeds.embed({ ...asked, input: ["a", "b"] })).embeddings.map((vector) => vector.length));
try {
  await client.chat({ model: "llama3", messages: hello });
} catch (error) {
  console.log(error.status_code, error.message);
}
console.log((await client.list()).models[0].name, (await client.ps()).models.length);
