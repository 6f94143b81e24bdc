"""OpenAI's protocol: fields of requests, objects of answers, tool calls and errors. Knows no server."""
