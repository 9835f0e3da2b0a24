import pytest
@pytest.hookimpl(trylast=True)
def pytest_runtestloop(session):
  # run only the one test after complete collection
  for item in session.items:
    if "test_mutations.py" in item.nodeid:
      item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
  return True
