// Steps of a session: each prints one line of JSON with its name and its error, if any.
export const { TEXT_URL: TEXT, TOOLS_URL: TOOLS } = process.env; // without /v1
export const CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Rome"}} </tool_call>';
export const LOOP = `SCRIPT: ${CALL} ||| It is 31 degrees in Rome.`; // a call, and its result's answer

export async function step(name, run) {
  let error = null;
  try {
    await run();
  } catch (caught) {
    console.error(caught);
    error = `${caught}`.slice(0, 300);
  }
  console.log(JSON.stringify({ step: name, error }));
}

export function same(value, expected) {
  if (value !== expected) throw new Error(`${JSON.stringify(value)} is not ${JSON.stringify(expected)}`);
}
