#include "server/ballastd/service_log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstddef>
#include <memory>

#include "cpu_optimizer_service/common/text/printable.h"

namespace ballast::server {
namespace {

// Together about 1 MiB at most.
constexpr size_t kLastLines = 256;
constexpr size_t kMostLineBytes = 4096;

// Everything that anyone logs passes the formatter, for each sink.
class OneLineFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& to) override {
    const std::string line =
        OneLine({message.payload.data(), message.payload.size()}, kMostLineBytes);
    spdlog::details::log_msg printable = message;
    printable.payload = line;
    pattern_.format(printable, to);
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<OneLineFormatter>();
  }

 private:
  spdlog::pattern_formatter pattern_;
};

}  // namespace

std::function<std::vector<std::string>()> StartLog(const std::string& level) {
  const auto last_lines = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(kLastLines);
  const spdlog::sinks_init_list sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>(),
                                         last_lines};
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("ballastd", sinks));
  spdlog::set_formatter(std::make_unique<OneLineFormatter>());
  // from_str takes a name that it does not know for "off". ParseBallastdFlags lets none through.
  spdlog::set_level(spdlog::level::from_str(level));
  return [last_lines] { return last_lines->last_formatted(); };
}

}  // namespace ballast::server
