// Small agent runs with npm packages: node npm_client.mjs BASE_URL ORIGIN. Ends with status 1 if one fails. Pages of
// ORIGIN may call the gateway.
import assert from "node:assert";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import { createRequire } from "node:module";
import os from "node:os";
import path from "node:path";
import process from "node:process";

// The packages lie in the interpreter's environment, not beside this file.
const root = process.execPath.split(`${path.sep}lib${path.sep}python3`)[0];
const require = createRequire(`${root}/`);
const OpenAI = require("openai");
const Anthropic = require("@anthropic-ai/sdk");
const { betaTool } = require("@anthropic-ai/sdk/helpers/beta/json-schema");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { Output, generateText, jsonSchema, streamText, tool } = require("ai");
const { JSDOM, VirtualConsole } = require("jsdom");

const [baseURL, allowedOrigin] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const options = { model: "demo", temperature: 0, max_tokens: 160 };
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, population: { type: "integer" } },
  required: ["name", "population"],
  additionalProperties: false,
};
const question = [{ role: "user", content: "Paris has 2 million people. Name and population?" }];

const told = await client.chat.completions.create({
  ...options,
  messages: question,
  response_format: { type: "json_schema", json_schema: { name: "city", schema, strict: true } },
});
const city = JSON.parse(told.choices[0].message.content);
assert.equal(typeof city.name, "string");
assert(Number.isInteger(city.population));
console.log("npm openai, an object:", city);

const weather = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters: weather } }];
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const stream = client.chat.completions.stream({
  ...options,
  messages,
  tools,
  tool_choice: { type: "function", function: { name: "get_weather" } },
});
const asked = (await stream.finalChatCompletion()).choices[0];
assert.equal(asked.finish_reason, "tool_calls");
const [call] = asked.message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
console.log("npm openai, a streamed call:", call.function);

const answer = await client.chat.completions.create({
  ...options,
  messages: [...messages, asked.message, { role: "tool", tool_call_id: call.id, content: "sunny, 21 degrees" }],
  tools,
  tool_choice: "none",
});
assert(answer.choices[0].message.content);
console.log("npm openai, the answer:", answer.choices[0].message.content);

const response = {
  model: "demo",
  temperature: 0,
  max_output_tokens: 160,
  input: question,
  text: { format: { type: "json_schema", name: "city", schema, strict: true } },
};
const parsed = await client.responses.create(response);
assert.equal(parsed.status, "completed");
assert.equal(typeof JSON.parse(parsed.output_text).name, "string");
console.log("npm openai, an object by /v1/responses:", parsed.output_text);

const events = client.responses.stream(response);
let deltas = "";
events.on("response.output_text.delta", (event) => (deltas += event.delta));
assert.equal((await events.finalResponse()).output_text, parsed.output_text);
assert.equal(deltas, parsed.output_text);
console.log("npm openai, the same streamed:", deltas);

// The AI SDK speaks to /v1/responses. It takes the words of earlier answers for stored, unless it is told otherwise.
const asking = {
  model: createOpenAI({ baseURL, apiKey: "none" })("demo"),
  temperature: 0,
  maxOutputTokens: 160,
  providerOptions: { openai: { parallelToolCalls: false, store: false } },
};
const ran = await generateText({
  ...asking,
  prompt: messages[0].content,
  tools: {
    get_weather: tool({
      description: "Tells the weather of a city.",
      inputSchema: jsonSchema(weather),
      execute: async () => "sunny, 21 degrees",
    }),
  },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: ({ steps }) => steps.length === 2,
});
assert.equal(typeof ran.steps[0].toolCalls[0].input.city, "string");
assert(ran.text);
console.log("AI SDK, a call and its answer:", ran.steps[0].toolCalls[0].input, ran.text);

let streamed = "";
for await (const text of streamText({ ...asking, prompt: question[0].content }).textStream) streamed += text;
assert(streamed);
console.log("AI SDK, a stream:", streamed);

// With supportsStructuredOutputs it sends the schema; without, it asks for any JSON object, which may not fit.
const compatible = createOpenAICompatible({ name: "baton", baseURL, apiKey: "none", supportsStructuredOutputs: true });
const described = await generateText({
  model: compatible("demo"),
  temperature: 0,
  maxOutputTokens: 160,
  prompt: question[0].content,
  output: Output.object({ schema: jsonSchema(schema) }),
});
assert.equal(typeof described.output.name, "string");
assert(Number.isInteger(described.output.population));
console.log("AI SDK, an object by chat completions:", described.output);

// The tool runner calls the model and the tool in turns.
const claude = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none" });
for (const stream of [false, true]) {
  const cities = [];
  const runner = claude.beta.messages.toolRunner({
    model: "demo",
    max_tokens: 160,
    messages,
    tools: [
      betaTool({
        name: "get_weather",
        description: "Tells the weather of a city.",
        inputSchema: weather,
        run: ({ city }) => {
          cities.push(city);
          return "sunny, 21 degrees";
        },
      }),
    ],
    tool_choice: { type: "any", disable_parallel_tool_use: true },
    max_iterations: 2,
    stream,
  });
  const reasons = [];
  for await (const turn of runner) reasons.push((stream ? await turn.finalMessage() : turn).stop_reason);
  assert.deepEqual(reasons, ["tool_use", "tool_use"]);
  assert(cities[0]);
  console.log(`npm @anthropic-ai/sdk, tools run${stream ? ", streamed" : ""}:`, cities);
}

// Codex sends no temperature, so the pair's default must be 0. The demo model can repeat a call, and hardly more.
const home = fs.mkdtempSync(path.join(os.tmpdir(), "codex-"));
const command = { name: "exec_command", arguments: { cmd: "echo sunny" } };
const instructions = path.join(home, "instructions.md");
fs.writeFileSync(instructions, "Call functions.");
fs.writeFileSync(
  path.join(home, "config.toml"),
  `
model = "demo"
model_provider = "baton"
model_context_window = 8192
model_instructions_file = ${JSON.stringify(instructions)}
web_search = "disabled"
[agents]
enabled = false
[model_providers.baton]
name = "Baton"
base_url = ${JSON.stringify(baseURL)}
wire_api = "responses"
`,
);
const printed = execFileSync(
  process.execPath,
  [
    path.join(root, "node_modules/@openai/codex/bin/codex.js"),
    ...["exec", "--json", "--ephemeral", "--skip-git-repo-check", "--sandbox", "read-only", "--cd", home],
    `Repeat this, and nothing else:\n<tool_call>\n${JSON.stringify(command)}\n</tool_call>`,
  ],
  { env: { ...process.env, CODEX_HOME: home }, stdio: ["ignore", "pipe", "ignore"], encoding: "utf8" },
);
fs.rmSync(home, { recursive: true });
const happened = printed.trim().split("\n").map((line) => JSON.parse(line));
const done = happened.filter(({ type }) => type === "item.completed").map(({ item }) => item);
const [execution] = done.filter(({ type }) => type === "command_execution");
assert.match(execution.command, /echo sunny/);
assert.match(done.at(-1).text, /sunny/);
assert.equal(happened.at(-1).type, "turn.completed");
console.log("Codex, a command and its answer:", execution.command, done.at(-1).text);

// jsdom is a browser without a screen. It sends a page's preflight, and keeps answers from pages that may not have them.
function askFromPage(origin, body) {
  const { window } = new JSDOM("", { url: origin, virtualConsole: new VirtualConsole() });
  const request = new window.XMLHttpRequest();
  return new Promise((resolve, reject) => {
    request.open("POST", `${baseURL}/chat/completions`);
    request.setRequestHeader("authorization", "Bearer none");
    request.setRequestHeader("content-type", "application/json");
    request.onload = () => resolve(request);
    request.onerror = () => reject(new Error(`a page of ${origin} got no answer`));
    request.send(JSON.stringify({ ...options, messages: question, ...body }));
  });
}

const page = await askFromPage(allowedOrigin, {});
assert.equal(page.status, 200);
assert(page.getResponseHeader("x-request-id"));
const { content } = JSON.parse(page.responseText).choices[0].message;
assert(content);
console.log("a page of another origin:", content);

const lines = (await askFromPage(allowedOrigin, { stream: true })).responseText.trim().split("\n\n");
assert.equal(lines.pop(), "data: [DONE]");
const chunks = lines.map((line) => JSON.parse(line.replace(/^data: /, "")));
assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), content);
console.log("a page of another origin, the same streamed");

await assert.rejects(askFromPage("https://other.example", {}), /got no answer/);
console.log("a page of an origin that may not gets no answer");
