// A progress bar on a terminal for long work.
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

// During its life its thread calls `look` twice a second, and draws the result in one line of
// `terminal`, standard error. Does nothing unless that is a terminal. Removes the line at its end.
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
  bool drawn_ = false;  // Used by the thread.
  std::optional<PeriodicThread> thread_;
};

// "[#####     ]  50% writing a checkpoint in /c: 1.0 of 2.0 GiB", at most `columns` wide.
std::string BarLine(const Activity& activity, size_t columns);

// For a bar: the job's newest work of these kinds. Without a job's name: the newest of all.
std::function<std::optional<Activity>()> WorkOf(std::shared_ptr<grpc::Channel> channel,
                                                std::string job, std::vector<ActivityKind> kinds);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_TERMINAL_PROGRESS_BAR_H_
