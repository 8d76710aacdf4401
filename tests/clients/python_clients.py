"""Small agent runs with the Python clients of other projects, in the environment that requirements.txt describes.

python python_clients.py BASE_URL

Prints a line for each run, and ends with status 1 if one failed. The demo model is small: what it says matters less
than that the answer has the form which the client asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import dspy
import instructor
import litellm
import smolagents
from agents import Agent as OpenAIAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import Anthropic, NotFoundError, beta_tool
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage as LlamaMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
KEY = "none"
MODEL = "demo"
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 160}
QUESTION = "Paris has 2 million people. Give its name and population as JSON with the keys name and population."
WEATHER = "What is the weather in Paris?"
CLERK = "Answer in JSON."
DELTA = "response.output_text.delta"
FUNCTION = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


def openai_parses() -> City | None:
    answer = OpenAI(base_url=URL, api_key=KEY).chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=City, **OPTIONS
    )
    return answer.choices[0].message.parsed


def openai_streams_an_object() -> City | None:
    with OpenAI(base_url=URL, api_key=KEY).chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=City, **OPTIONS
    ) as stream:
        return stream.get_final_completion().choices[0].message.parsed


def openai_calls_a_tool_and_answers() -> str | None:
    client = OpenAI(base_url=URL, api_key=KEY)
    tools: Any = [{"type": "function", "function": FUNCTION}]
    messages: Any = [{"role": "user", "content": WEATHER}]
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, **OPTIONS
    )
    (choice,) = asked.choices
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments)["city"]
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
    told = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="none", **OPTIONS)
    return told.choices[0].message.content


def openai_streams_a_call() -> str:
    stream = OpenAI(base_url=URL, api_key=KEY).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[{"type": "function", "function": FUNCTION}],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        stream=True,
        **OPTIONS,
    )
    calls = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    parts = [call.function for call in calls if call.function is not None]
    assert [part.name for part in parts if part.name] == ["get_weather"], parts
    return json.loads("".join(part.arguments or "" for part in parts))["city"]


def openai_responses_call_a_tool_and_answer() -> str:
    client = OpenAI(base_url=URL, api_key=KEY)
    asked: Any = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": 160,
        "tools": [{"type": "function", **FUNCTION}],
    }
    history: Any = [{"role": "user", "content": WEATHER}]
    with client.responses.stream(**asked, input=history, tool_choice="required", parallel_tool_calls=False) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments)["city"]
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}]
    return client.responses.create(**asked, input=history, tool_choice="none").output_text


def openai_responses_parse() -> City | None:
    client = OpenAI(base_url=URL, api_key=KEY)
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 160}
    return client.responses.parse(**asked, input=QUESTION, text_format=City).output_parsed


def openai_responses_stream_what_they_answer() -> str:
    client = OpenAI(base_url=URL, api_key=KEY)
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 24, "input": WEATHER}
    told = client.responses.create(**asked).output_text
    streamed = [event.delta for event in client.responses.create(**asked, stream=True) if event.type == DELTA]
    assert len(streamed) > 1 and "".join(streamed) == told, streamed
    return told


def langchain(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, **OPTIONS, **options)


def langchain_parses() -> list[Any]:
    methods: Any = ("json_schema", "function_calling")
    models = (langchain(), langchain(use_responses_api=True))
    return [each.with_structured_output(City, method=method).invoke(QUESTION) for each in models for method in methods]


def langchain_binds_tools() -> Any:
    @tool
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return "sunny"

    bound = langchain().bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    return bound.invoke(WEATHER).tool_calls[0]["args"]["city"]


def pydantic_ai_runs_an_agent() -> list[City]:
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    models = (OpenAIChatModel(MODEL, provider=provider), PydanticResponsesModel(MODEL, provider=provider))
    agents = [Agent(model, output_type=City, model_settings={"temperature": 0, "max_tokens": 160}) for model in models]
    return [agent.run_sync(QUESTION).output for agent in agents]


def instructor_parses() -> list[City]:
    modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
    return [
        instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode).chat.completions.create(
            model=MODEL,
            response_model=City,
            messages=[{"role": "user", "content": QUESTION}],
            max_retries=0,
            **OPTIONS,
        )
        for mode in modes
    ]


def lite(**asked: Any) -> Any:
    return litellm.completion(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, **OPTIONS, **asked)


def litellm_parses() -> City:
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "response_format": City}
    return City.model_validate_json(lite(**asked).choices[0].message.content)


def litellm_calls_a_tool_and_answers() -> str:
    messages: Any = [{"role": "user", "content": WEATHER}]
    tools = [{"type": "function", "function": FUNCTION}]
    told: Any = {"messages": messages, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    asked = lite(**told).choices[0].message
    streamed = litellm.stream_chunk_builder(list(lite(**told, stream=True))).choices[0].message
    (call,), (same,) = asked.tool_calls, streamed.tool_calls
    assert json.loads(call.function.arguments)["city"]
    assert same.function == call.function, same
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
    return lite(messages=messages, tools=tools, tool_choice="none").choices[0].message.content


def llama_index_parses_calls_and_streams() -> list[Any]:
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"sunny in {city}"

    model = OpenAILike(
        model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, **OPTIONS
    )
    called = model.predict_and_call(
        [FunctionTool.from_defaults(get_weather)],
        user_msg=WEATHER,
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    streamed = model.stream_chat([LlamaMessage(role="user", content=WEATHER)])
    answer = str(called)
    assert answer.startswith("sunny in "), answer
    return [
        model.as_structured_llm(City).complete(QUESTION).raw,
        answer,
        "".join(each.delta or "" for each in streamed),
    ]


def smolagents_run_an_agent() -> str:
    asked: list[str] = []

    @smolagents.tool
    def get_weather(city: str) -> str:
        """Tells the weather of a city.

        Args:
            city: The name of the city.
        """
        asked.append(city)
        return "sunny, 21 degrees"

    model = smolagents.OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, **OPTIONS)
    agent = smolagents.ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
    answer = agent.run(f"{WEATHER} Call get_weather first.")
    return f"{answer} (asked: {asked})"


def dspy_parses() -> City:
    class Asked(dspy.Signature):  # type: ignore[misc]
        question: str = dspy.InputField()
        city: City = dspy.OutputField()

    # It sends a schema to all models of this provider, and of "openai" to those whose names it knows.
    model = dspy.LM(f"lm_studio/{MODEL}", api_base=URL, api_key=KEY, cache=False, **OPTIONS)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        return dspy.Predict(Asked)(question=QUESTION).city


def openai_agents_run() -> list[City]:
    async def run() -> list[City]:
        found = []
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
                agent = OpenAIAgent(name="clerk", instructions=CLERK, model=kind(MODEL, client), output_type=City)
                found.append((await Runner.run(agent, QUESTION)).final_output_as(City))
        return found

    set_tracing_disabled(True)
    return asyncio.run(run())


def openai_agents_call_a_tool() -> str:
    asked: list[str] = []

    @function_tool
    def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    async def run() -> str:
        settings = ModelSettings(temperature=0, max_tokens=160, tool_choice="required", parallel_tool_calls=False)
        async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
            model = OpenAIResponsesModel(MODEL, client)
            agent = OpenAIAgent(name="clerk", model=model, tools=[get_weather], model_settings=settings)
            return (await Runner.run(agent, WEATHER)).final_output_as(str)

    set_tracing_disabled(True)
    answer = asyncio.run(run())
    assert len(asked) == 1
    return answer


class Place(BaseModel):
    """A class without bounds, which the package would not send."""

    name: str
    population: int


CLAUDE: dict[str, Any] = {"model": MODEL, "max_tokens": 160, "extra_body": {"temperature": 0}}


def messages_api() -> Any:
    return Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY).messages


def anthropic_answers() -> str:
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "system": "Answer in JSON."}
    told = messages_api().create(**CLAUDE, **asked, stop_sequences=["2"])
    with messages_api().stream(**CLAUDE, **asked, stop_sequences=["2"]) as stream:
        streamed = stream.get_final_message()
    assert told.stop_sequence == streamed.stop_sequence == "2"
    assert streamed.content[0].text == told.content[0].text
    counted = messages_api().count_tokens(model=MODEL, **asked)
    assert counted.input_tokens == told.usage.input_tokens + told.usage.cache_read_input_tokens
    return told.content[0].text


def anthropic_parses() -> Place | None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return messages_api().parse(**CLAUDE, messages=messages, output_format=Place).parsed_output


def anthropic_calls_a_tool_and_answers() -> str:
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    messages: Any = [{"role": "user", "content": WEATHER}]
    chosen = {"type": "any", "disable_parallel_tool_use": True}
    asked = messages_api().create(**CLAUDE, messages=messages, tools=[tool], tool_choice=chosen)
    with messages_api().stream(**CLAUDE, messages=messages, tools=[tool], tool_choice=chosen) as stream:
        (streamed,) = stream.get_final_message().content
    (call,) = asked.content
    assert asked.stop_reason == call.type == "tool_use" and call.input["city"], asked
    assert streamed.input == call.input, streamed
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    told = messages_api().create(**CLAUDE, messages=messages, tools=[tool], tool_choice={"type": "none"})
    return told.content[0].text


def anthropic_runs_tools() -> list[str]:
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    def run(**options: Any) -> list[Any]:
        runner = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY).beta.messages.tool_runner(
            **CLAUDE,
            messages=[{"role": "user", "content": WEATHER}],
            tools=[get_weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=2,
            **options,
        )
        return [turn.get_final_message() if options else turn for turn in runner]

    for turns in (run(), run(stream=True)):
        assert [turn.stop_reason for turn in turns] == ["tool_use"] * 2, turns
    assert asked and len({*asked}) == 1, asked
    return asked


def anthropic_is_told_what_is_wrong() -> str:
    try:
        messages_api().create(model="other", messages=[{"role": "user", "content": WEATHER}], max_tokens=1)
    except NotFoundError as error:
        assert error.request_id, error
        return error.message
    raise AssertionError("no error")


RUNS: tuple[Callable[[], Any], ...] = (
    openai_parses,
    openai_streams_an_object,
    openai_calls_a_tool_and_answers,
    openai_streams_a_call,
    openai_responses_call_a_tool_and_answer,
    openai_responses_parse,
    openai_responses_stream_what_they_answer,
    langchain_parses,
    langchain_binds_tools,
    pydantic_ai_runs_an_agent,
    instructor_parses,
    litellm_parses,
    litellm_calls_a_tool_and_answers,
    llama_index_parses_calls_and_streams,
    smolagents_run_an_agent,
    dspy_parses,
    openai_agents_run,
    openai_agents_call_a_tool,
    anthropic_answers,
    anthropic_parses,
    anthropic_calls_a_tool_and_answers,
    anthropic_runs_tools,
    anthropic_is_told_what_is_wrong,
)


def main() -> int:
    num_failed = 0
    for run in RUNS:
        try:
            answer = run()
            assert answer and None not in (answer if isinstance(answer, list) else [answer]), "no answer"
            print(f"{run.__name__}: {answer}", flush=True)
        except Exception:
            num_failed += 1
            print(f"{run.__name__} FAILED\n{traceback.format_exc()}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
