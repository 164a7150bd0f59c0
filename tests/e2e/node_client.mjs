import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "k", maxRetries: 0 });
const asked = { model, temperature: 0, max_tokens: 24, messages: [{ role: "user", content: "Tell" }] };
const say = (found) => console.log(JSON.stringify(found));

say((await client.chat.completions.create(asked)).choices[0].message.content);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
say(text);
const response = await client.responses.create({ model, temperature: 0, max_output_tokens: 24, input: "Tell" });
say(response.output_text);
const parameters = {
  type: "object",
  properties: { dish: { enum: ["soup", "bread"] } },
  required: ["dish"],
  additionalProperties: false,
};
const forced = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  tools: [{ type: "function", function: { name: "cook", parameters } }],
  tool_choice: "required",
  parallel_tool_calls: false,
});
say(forced.choices[0].message.tool_calls[0].function);
say((await client.embeddings.create({ model, input: "Tell" })).data[0].embedding.length);
