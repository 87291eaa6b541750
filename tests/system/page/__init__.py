"""The page in a real browser, before a real server and a scripted one."""
