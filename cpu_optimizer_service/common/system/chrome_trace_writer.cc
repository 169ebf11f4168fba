#include "cpu_optimizer_service/common/system/chrome_trace_writer.h"

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using Json = ChromeTraceWriter::Json;

std::string OneLine(const Json& json) {
  // Without `replace` dump would throw where a name is not UTF-8.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Each event follows another in the array, the first one that of Head.
std::string Next(const Json& json) { return absl::StrCat(",\n", OneLine(json)); }

}  // namespace

// Phases of Google's Trace Event Format: M describes a process or track, X is a slice with its
// duration, i is an instant.
std::string ChromeTraceWriter::Head() const {
  return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n",
                      OneLine({{"name", "process_name"},
                               {"ph", "M"},
                               {"pid", process_},
                               {"args", {{"name", process_name_}}}}));
}

std::string ChromeTraceWriter::Track(int track, const std::string& name, int sort_index) const {
  const auto describe = [&](const char* what, const Json& arguments) {
    return Next(
        {{"name", what}, {"ph", "M"}, {"pid", process_}, {"tid", track}, {"args", arguments}});
  };
  return describe("thread_name", {{"name", name}}) +
         describe("thread_sort_index", {{"sort_index", sort_index}});
}

std::string ChromeTraceWriter::Slice(int track, const Event& event) const {
  Json line = Line(event, "X", track);
  line["dur"] = event.duration_us;
  return Next(line);
}

std::string ChromeTraceWriter::Instant(int track, const Event& event) const {
  Json line = Line(event, "i", track);
  line["s"] = "p";  // The scope: the process.
  return Next(line);
}

std::string ChromeTraceWriter::Tail(const Json& other_data) {
  return absl::StrCat("\n],\"otherData\":", OneLine(other_data), "}\n");
}

Json ChromeTraceWriter::Line(const Event& event, const char* phase, int track) const {
  return {{"name", event.name},     {"cat", event.category}, {"ph", phase},
          {"pid", process_},        {"tid", track},          {"ts", event.begin_us},
          {"args", event.arguments}};
}

}  // namespace ballast
