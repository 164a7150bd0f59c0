import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const reached = { baseURL: process.argv[2], apiKey: "k" };
const models = [
  createOpenAI(reached)("fake"),
  createOpenAI(reached).chat("fake"),
  createOpenAICompatible({ name: "baton", ...reached })("fake"),
  createAnthropic(reached)("fake"),
];
const tools = {
  look_up: tool({
    description: "What a word means.",
    inputSchema: z.object({ word: z.string() }),
    execute: async ({ word }) => `${word} is a flower`,
  }),
};
const providerOptions = {
  openai: { reasoningEffort: "high", textVerbosity: "low" },
  baton: { reasoningEffort: "xhigh" },
  anthropic: { effort: "high", thinking: { type: "enabled", budgetTokens: 1024 } },
};
for (const model of models) {
  const asked = { model, maxRetries: 0 };
  console.log((await generateText({ ...asked, prompt: "hello" })).text);
  let text = "";
  for await (const part of streamText({ ...asked, prompt: "hello" }).textStream) {
    text += part;
  }
  console.log(text);
  const answer = { ...asked, prompt: "What is heliotrope?", tools, stopWhen: stepCountIs(3), providerOptions };
  console.log((await generateText(answer)).text);
}
