# client: instructor
# pip: instructor==1.17.0
import instructor
import openai
from pydantic import BaseModel

from steps import REPORT, REPORT_CALL, TOOLS, same, step


class Report(BaseModel):
    """Report of the weather."""

    city: str
    degrees: int


SCRIPTS = {
    "TOOLS": REPORT_CALL,
    "TOOLS_STRICT": REPORT_CALL,
    "RESPONSES_TOOLS": REPORT_CALL,
    "JSON": REPORT,
    "JSON_SCHEMA": REPORT,
    "MD_JSON": f"```json {REPORT} ```",
}


def client(mode):
    ai = openai.OpenAI(base_url=f"{TOOLS}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(ai, mode=instructor.Mode[mode])


def options(script):
    messages = [{"role": "user", "content": f"SCRIPT: {script}"}]
    return {"model": "scripted", "messages": messages, "response_model": Report, "max_retries": 0}


for name, script in SCRIPTS.items():

    @step(name)
    def _(name=name, script=script):
        response = client(name).chat.completions.create(**options(script))
        same((response.city, response.degrees), ("Rome", 31))


@step("partial output, streamed")
def _():
    partial_call = REPORT_CALL.replace("Report", "PartialReport")
    *_, last = client("TOOLS").chat.completions.create_partial(**options(partial_call))
    same(last.degrees, 31)
