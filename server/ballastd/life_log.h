// What the log has of the life of jobs: a line for each event, and how far long work is.
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

// "job gpt2: TEXT", or the text alone where no job is meant.
std::string LineOf(const std::string& job, const std::string& text);

// Thread-safe.
class LifeLog {
 public:
  using Clock = std::chrono::steady_clock;

  // `log` gets "job NAME: ..."; any thread.
  explicit LifeLog(std::function<void(const std::string& line)> log) : log_(std::move(log)) {}

  // At once. A rank that comes and goes again and again has kMostLines in a minute, and so have a
  // job's events that are of no rank. Of what is left out the last one follows at the minute's end,
  // with the number of the others.
  static constexpr int kMostLines = 8;
  static constexpr std::chrono::minutes kWindow{1};
  void Tell(const JobEvent& event, Clock::time_point now = Clock::now());

  // To be called about every second. Work has its first line after kFirst, and then one whenever it
  // has taken a tenth more, at least kFirst: what takes hours does not fill the log.
  static constexpr double kFirst = 5;  // Seconds.
  void Look(const std::vector<Activity>& activities, Clock::time_point now = Clock::now());

 private:
  struct Window {
    Clock::time_point since;
    int lines = 0;
    int left_out = 0;
    std::string last;  // Of those that are left out.
  };
  using Windows = std::map<std::pair<std::string, int>, Window>;
  // The line of a window that has ended; empty: nothing was left out.
  static std::string Rest(const Windows::value_type& window);

  const std::function<void(const std::string&)> log_;
  Mutex mutex_;
  Windows windows_ ABSL_GUARDED_BY(mutex_);                  // By job and rank.
  std::map<uint64_t, double> told_ ABSL_GUARDED_BY(mutex_);  // By activity: at its seconds.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_LIFE_LOG_H_
