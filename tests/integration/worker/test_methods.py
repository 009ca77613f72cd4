"""Fork or fresh program: what is preloaded, what makes forking unsafe, and what a worker without it looks like."""

from __future__ import annotations

import pytest


def test_exec_workers(cold, tmp_path):
    """Without a warm parent a worker is a fresh Python with the contract's descriptors, and no listening socket."""
    body = """
        import os, sys
        from elasticrt.contract.channel import Channel
        from elasticrt.contract.messages import Claim
        from elasticrt.contract.env import WorkerEnv
        env = WorkerEnv.from_env(os.environ)
        Channel.adopt(env.channel_fd).send(Claim(1, "x", "1"))
        print("torch" in sys.modules, env.listen_fd, sys.stdout.write_through, sys.argv[1:])
        sys.exit(3)
        """
    result = cold.run(body, tmp_path, arguments=("a", "b"))
    assert result.out[0] == "False -1 True ['a', 'b']\n", result.err
    assert result.codes == {0: 3}
    assert [e.message.name for e in result.events if type(e).__name__ == "WorkerSaid"] == ["x"]
    assert cold.warm.method == "exec"


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_script_with_a_torch_of_its_own(session_mark, tmp_path, name):
    """A directory with a `torch.py` beside the script gets fresh interpreters, and the reason is said."""
    from conftest import Rig

    (tmp_path / f"{name}.py").write_text("who = 'mine'")
    rig = Rig("fork", script=str(tmp_path / "script.py"))
    try:
        result = rig.run(f"import {name}; print({name}.who)", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, result.out[0]) == ("exec", "mine\n")
    assert name in rig.warm.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()", "thread"),
        ("import socket\ns = socket.socket()", "socket"),
        ("raise ImportError('not today')", "not today"),
    ],
)
def test_what_cannot_be_forked_is_not(session_mark, tmp_path, body, reason):
    """A preloaded module with a thread or a socket makes forking unsafe: seen, said, and workers are started anew."""
    from conftest import Rig

    (tmp_path / "preloaded.py").write_text(body)
    rig = Rig("fork", preload=["preloaded"], script=str(tmp_path / "script.py"))
    try:
        result = rig.run("print('runs')", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, result.out[0]) == ("exec", "runs\n")
    assert reason in rig.warm.reason


def test_preload(session_mark, tmp_path):
    """A preloaded module is imported once, from beside the script, and is there in every worker."""
    from conftest import Rig

    (tmp_path / "slow.py").write_text("import os\nwho = os.getpid()")
    rig = Rig("fork", preload=["slow"], script=str(tmp_path / "script.py"))
    try:
        result = rig.run("import slow, sys; print(slow.who, sys.path.count(sys.path[0]))", tmp_path)
    finally:
        rig.close()
    assert result.out[0] == f"{rig.parent.pid} 1\n"
