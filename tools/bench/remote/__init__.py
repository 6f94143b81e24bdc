"""``specrt bench --url``: servers of OpenAI's API, measured from outside."""
