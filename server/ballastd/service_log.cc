#include "server/ballastd/service_log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstddef>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast::server {
namespace {

// Together about 1 MiB at most.
constexpr size_t kLastLines = 256;
constexpr size_t kMostLineBytes = 4096;

LogPriority PriorityOf(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::critical:
    case spdlog::level::err:
      return kErrorPriority;
    case spdlog::level::warn:
      return kWarningPriority;
    case spdlog::level::info:
      return kInfoPriority;
    default:
      return kDebugPriority;
  }
}

// Lines of a job begin with "job NAME: ". Empty: this is none.
absl::string_view JobOf(absl::string_view line) {
  constexpr absl::string_view kJob = "job ";
  if (!absl::StartsWith(line, kJob)) return "";
  line.remove_prefix(kJob.size());
  const absl::string_view name = line.substr(0, line.find(": "));
  return name.size() < line.size() && IsJobName(name) ? name : "";
}

std::string JsonOf(const spdlog::details::log_msg& message, const std::string& line) {
  const absl::string_view level(message.level == spdlog::level::err
                                    ? "error"
                                    : spdlog::level::to_string_view(message.level).data());
  nlohmann::ordered_json json = {
      {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromChrono(message.time),
                                absl::UTCTimeZone())},
      {"level", std::string(level)},
      {"message", line}};
  if (const absl::string_view job = JobOf(line); !job.empty()) json["job"] = std::string(job);
  return json.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
}

// Everything that anyone logs passes the formatter, for each sink.
class OneLineFormatter final : public spdlog::formatter {
 public:
  OneLineFormatter(LogFormat format, bool has_priority)
      : format_(format),
        has_priority_(has_priority),
        // The journal has a time of its own.
        pattern_(has_priority ? "[%l] %v" : "%+") {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& to) override {
    const std::string line =
        OneLine({message.payload.data(), message.payload.size()}, kMostLineBytes);
    const auto add = [&to](absl::string_view text) {
      to.append(text.data(), text.data() + text.size());
    };
    if (has_priority_) add(absl::StrCat("<", PriorityOf(message.level), ">"));
    if (format_ == LogFormat::kJson) return add(absl::StrCat(JsonOf(message, line), "\n"));
    spdlog::details::log_msg printable = message;
    printable.payload = line;
    pattern_.format(printable, to);
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<OneLineFormatter>(format_, has_priority_);
  }

 private:
  const LogFormat format_;
  const bool has_priority_;
  spdlog::pattern_formatter pattern_;
};

}  // namespace

std::function<std::vector<std::string>()> StartLog(const std::string& level) {
  const auto stderr_sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  const auto last_lines = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(kLastLines);
  const spdlog::sinks_init_list sinks = {stderr_sink, last_lines};
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("ballastd", sinks));
  stderr_sink->set_formatter(std::make_unique<OneLineFormatter>(TheLogFormat(), LogIsJournal()));
  last_lines->set_formatter(std::make_unique<OneLineFormatter>(LogFormat::kText, false));
  // from_str takes a name that it does not know for "off". ParseBallastdFlags lets none through.
  spdlog::set_level(spdlog::level::from_str(level));
  return [last_lines] { return last_lines->last_formatted(); };
}

}  // namespace ballast::server
