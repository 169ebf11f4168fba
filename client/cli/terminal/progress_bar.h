// A bar on a terminal that shows how far long work is.
#ifndef BALLAST_CLIENT_CLI_TERMINAL_PROGRESS_BAR_H_
#define BALLAST_CLIENT_CLI_TERMINAL_PROGRESS_BAR_H_

#include <grpcpp/channel.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"
#include "cpu_optimizer_service/common/text/activity.h"

namespace ballast::client::cli {

// While it lives, asks `look` twice a second, on a thread of its own, and draws what that returns in
// one line of `terminal`, standard error. Nothing, where that is no terminal. Takes the line away at
// its end.
class ProgressBar {
 public:
  explicit ProgressBar(std::function<std::optional<Activity>()> look, int terminal = 2);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

 private:
  void Draw();

  const std::function<std::optional<Activity>()> look_;
  const int terminal_;
  bool drawn_ = false;  // The thread's.
  std::optional<PeriodicThread> thread_;
};

// "[#####     ]  50% writing a checkpoint in /c: 1.0 of 2.0 GiB", at most so wide.
std::string BarLine(const Activity& activity, size_t columns);

// The newest work of these kinds for the job, or, without a job's name, of any or none: for a bar.
std::function<std::optional<Activity>()> WorkOf(std::shared_ptr<grpc::Channel> channel,
                                                std::string job, std::vector<ActivityKind> kinds);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_TERMINAL_PROGRESS_BAR_H_
