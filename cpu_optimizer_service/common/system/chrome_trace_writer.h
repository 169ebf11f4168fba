// A timeline as the JSON that ui.perfetto.dev and chrome://tracing open, in pieces of text: one
// process with tracks, times in microseconds.
//
//   const ChromeTraceWriter writer(rank, "ballast-worker rank 0");
//   text += writer.Head();
//   text += writer.Track(1, "compute", /*sort_index=*/1);
//   text += writer.Slice(1, {.name = "compute", .category = "compute", .begin_us = 10, ...});
//   text += ChromeTraceWriter::Tail({{"rank", 0}});
//
// A track is described before its first event. Bytes that are not UTF-8 are replaced. Thread-safe.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHROME_TRACE_WRITER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHROME_TRACE_WRITER_H_

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace ballast {

class ChromeTraceWriter {
 public:
  using Json = nlohmann::ordered_json;
  struct Event {
    std::string name;
    std::string category;
    double begin_us = 0;
    double duration_us = 0;  // Not used by Instant.
    Json arguments;
  };

  ChromeTraceWriter(int process, std::string process_name)
      : process_(process), process_name_(std::move(process_name)) {}

  std::string Head() const;
  std::string Track(int track, const std::string& name, int sort_index) const;
  std::string Slice(int track, const Event& event) const;
  // Shown as a line through the whole process.
  std::string Instant(int track, const Event& event) const;
  // With facts about the whole file.
  static std::string Tail(const Json& other_data);

 private:
  Json Line(const Event& event, const char* phase, int track) const;

  const int process_;
  const std::string process_name_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_CHROME_TRACE_WRITER_H_
