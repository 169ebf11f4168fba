#include "server/ballastd/life_log.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ballast::server {

std::string LineOf(const std::string& job, const std::string& text) {
  return job.empty() ? text : absl::StrCat("job ", job, ": ", text);
}

std::string LifeLog::Rest(const Windows::value_type& window) {
  const auto& [of, rest] = window;
  if (rest.left_out == 0) return "";
  return absl::StrCat(LineOf(of.first, rest.last), " (and ", rest.left_out - 1,
                      " lines like it before, of the last minute)");
}

void LifeLog::Tell(const JobEvent& event, Clock::time_point now) {
  std::string rest;
  bool is_left_out = false;
  {
    MutexLock lock(mutex_);
    const auto found = windows_.try_emplace({event.job, event.rank}).first;
    Window& window = found->second;
    if (window.lines == 0 || now - window.since >= kWindow) {
      rest = Rest(*found);
      window = {.since = now};
    }
    is_left_out = ++window.lines > kMostLines;
    if (is_left_out) {
      ++window.left_out;
      window.last = event.text;
    }
  }
  if (!rest.empty()) log_(rest);
  if (!is_left_out) log_(LineOf(event.job, event.text));
}

void LifeLog::Look(const std::vector<Activity>& activities, Clock::time_point now) {
  std::vector<std::string> lines;
  {
    MutexLock lock(mutex_);
    for (auto window = windows_.begin(); window != windows_.end();) {
      if (now - window->second.since < kWindow) {
        ++window;
        continue;
      }
      if (std::string rest = Rest(*window); !rest.empty()) lines.push_back(std::move(rest));
      window = windows_.erase(window);
    }
    std::map<uint64_t, double> told;
    for (const Activity& activity : activities) {
      const auto before = told_.find(activity.number);
      const double last = before == told_.end() ? 0 : before->second;
      const bool is_due = activity.seconds - last >= std::max(kFirst, last / 10);
      if (is_due) lines.push_back(LineOf(activity.job, ToLine(activity)));
      told[activity.number] = is_due ? activity.seconds : last;
    }
    told_ = std::move(told);
  }
  for (const std::string& line : lines) log_(line);
}

}  // namespace ballast::server
