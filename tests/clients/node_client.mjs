import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "k", maxRetries: 0 });
const hello = [{ role: "user", content: "hello" }];
const asked = { model: "fake" };
console.log((await client.chat.completions.create({ ...asked, messages: hello })).choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, messages: hello, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
console.log(text);
const runner = client.chat.completions.runTools({
  ...asked,
  messages: [{ role: "user", content: "What is heliotrope?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "look_up",
        description: "What a word means.",
        parameters: { type: "object", properties: { word: { type: "string" } }, required: ["word"] },
        parse: JSON.parse,
        function: ({ word }) => `${word} is a flower`,
      },
    },
  ],
});
console.log(await runner.finalContent());
