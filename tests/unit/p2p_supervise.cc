// Steps of every kind for the P2P probe's supervisor, without a card: test_p2p_supervise.py compiles and reads this.
#include "supervise.h"
#include <cstdlib>
#include <stdexcept>

static std::string pid() { return std::to_string(getpid()); }

int main() {
    const auto done = [] { return Record().text("pid", pid()); };
    std::vector<Step> steps;
    const auto add = [&](const char *name, std::function<Record()> run, bool alone = false) {
        steps.push_back({Record().text("name", name), run, alone, ""});
    };
    add("first", done);
    add("second", done);
    add("hangs", [] { for (;;) pause(); return Record(); });
    add("after a hang", done);
    add("throws", []() -> Record { throw std::runtime_error("a \"quoted\" reason\n"); });
    add("after an error", done);
    add("crashes", []() -> Record { std::abort(); });
    add("leaves", []() -> Record { _exit(0); });
    add("after leaving", done);
    add("alone", done, true);
    add("alone too", done, true);
    add("last", done);
    Supervisor supervisor(1.0, 0.5);
    supervisor.run(steps);
    for (const Step &step : steps) std::printf("%s\n", step.result.c_str());
}
