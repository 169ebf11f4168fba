// Log lines of jobs' lives: a line for each event, and the progress of long work.
#ifndef BALLAST_SERVER_BALLASTD_LIFE_LOG_H_
#define BALLAST_SERVER_BALLASTD_LIFE_LOG_H_

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/job/job_status.h"

namespace ballast::server {

// "job gpt2: TEXT"; without a job only the text.
std::string LineOf(const std::string& job, const std::string& text);

// Thread-safe.
class LifeLog {
 public:
  using Clock = std::chrono::steady_clock;

  // `log` gets "job NAME: ..."; any thread.
  explicit LifeLog(std::function<void(const std::string& line)> log) : log_(std::move(log)) {}

  // Logs at once. A rank that comes and goes repeatedly has at most kMostLines in a minute, and so
  // have a job's events without a rank. At the minute's end the last left-out one follows, with the
  // number of the others.
  static constexpr int kMostLines = 8;
  static constexpr std::chrono::minutes kWindow{1};
  void Tell(const JobEvent& event, Clock::time_point now = Clock::now());

  // Call it about every second. Work has its first line after kFirst. Then it has one whenever it
  // has taken a tenth more, at least kFirst: hours of work do not fill the log.
  static constexpr double kFirst = 5;  // Seconds.
  void Look(const std::vector<Activity>& activities, Clock::time_point now = Clock::now());

 private:
  struct Window {
    Clock::time_point since;
    int lines = 0;
    int left_out = 0;
    std::string last;  // The last one left out.
  };
  using Windows = std::map<std::pair<std::string, int>, Window>;
  // The line of a window that has ended; empty if no line was left out.
  static std::string Rest(const Windows::value_type& window);

  const std::function<void(const std::string&)> log_;
  Mutex mutex_;
  Windows windows_ ABSL_GUARDED_BY(mutex_);                  // By job and rank.
  std::map<uint64_t, double> told_ ABSL_GUARDED_BY(mutex_);  // By activity: its seconds at its last
                                                             // line.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_LIFE_LOG_H_
