// Run steps in a child process and kill it when one takes too long: a kernel that waits for a broken link cannot be stopped
// from inside, and the process with it. The next steps get a new child.
#pragma once
#include "record.h"
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <poll.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

struct Step {
    Record names;                // what it is about; its result is added to it
    std::function<Record()> run;  // in the child
    bool alone = false;          // in a child that did nothing else before
    std::string result;          // JSON
};

class Supervisor {
  public:
    // setup_s: what a child may take for its first step more than for others, as it opens the cards.
    Supervisor(double limit_s, double setup_s) : limit_s_(limit_s), setup_s_(setup_s) {}

    void run(std::vector<Step> &steps) {
        size_t next = 0;
        while (next < steps.size()) {
            if (stuck_) {
                steps[next].result = failed(steps[next], "not_run", "a process of this probe hangs in the driver and cannot be killed");
                ++next;
            } else {
                next = with_one_child(steps, next);
            }
        }
    }

  private:
    static std::string failed(const Step &step, const char *state, const std::string &why) {
        Record record = step.names;
        return record.text("state", state).text("error", why).json();
    }

    // Carries out steps from `first` on; returns the first that is still to be done.
    size_t with_one_child(std::vector<Step> &steps, size_t first) {
        int ends[2];
        if (pipe(ends)) {
            steps[first].result = failed(steps[first], "not_run", "no pipe");
            return first + 1;
        }
        std::fflush(nullptr);
        const pid_t child = fork();
        if (child == 0) {
            close(ends[0]);
            work(steps, first, ends[1]);
            _exit(0);
        }
        close(ends[1]);
        size_t at = first;
        std::string line;
        while (at < steps.size() && read_line(ends[0], line, limit_s_ + (at == first ? setup_s_ : 0))) {
            if (line.empty()) break;  // the child is gone
            steps[at++].result = line;
        }
        const bool timed_out = line == kLate;
        close(ends[0]);
        if (timed_out) kill(child, SIGKILL);
        const int status = reap(child);
        // Who ends well has done a step at least, or it would be asked for the same for ever.
        const bool ended_well = !timed_out && WIFEXITED(status) && WEXITSTATUS(status) == 0 && at > first;
        if (at < steps.size() && !ended_well) {
            char why[96];
            if (timed_out) std::snprintf(why, sizeof why, "no answer within %g s", limit_s_);
            else if (WIFSIGNALED(status)) std::snprintf(why, sizeof why, "the process ended by signal %d", WTERMSIG(status));
            else std::snprintf(why, sizeof why, "the process ended without a result");
            steps[at].result = failed(steps[at], timed_out ? "hung" : "error", why);
            ++at;
        }
        return at;
    }

    // The child: after an error its cards are in no state for another step.
    static void work(std::vector<Step> &steps, size_t first, int out) {
        for (size_t at = first; at < steps.size(); ++at) {
            if (steps[at].alone && at != first) return;
            Record record = steps[at].names;
            bool good = true;
            std::string why;
            try {
                const std::string measured = steps[at].run().json();
                record.text("state", "done").raw("measured", measured);
            } catch (const std::exception &error) {
                good = false;
                record.text("state", "error").text("error", error.what());
            }
            const std::string text = record.json() + "\n";
            if (write(out, text.data(), text.size()) != static_cast<ssize_t>(text.size())) return;
            if (!good || steps[at].alone) return;
        }
    }

    // False and kLate when nothing came in time; true and an empty line at the end of the stream.
    bool read_line(int from, std::string &line, double seconds) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        line.clear();
        for (char c; ;) {
            const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
            pollfd wait{from, POLLIN, 0};
            if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) == 0) {
                line = kLate;
                return false;
            }
            const ssize_t got = read(from, &c, 1);
            if (got <= 0) {
                line.clear();
                return true;
            }
            if (c == '\n') return true;
            line += c;
        }
    }

    // A process that hangs in the driver survives SIGKILL; whoever waits for it hangs as well.
    int reap(pid_t child) {
        int status = 0;
        for (int tenths = 0; tenths < 100; ++tenths) {
            if (waitpid(child, &status, WNOHANG) == child) return status;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        stuck_ = true;
        return -1;
    }

    static constexpr const char *kLate = "late";
    double limit_s_, setup_s_;
    bool stuck_ = false;
};
