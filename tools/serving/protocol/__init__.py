"""OpenAI's protocol: fields of requests, objects of responses, tool calls and errors. Independent of the server."""
