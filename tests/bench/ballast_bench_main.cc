// ballast-bench worker: a load on a service, from ranks that need no GPU.
// ballast-bench lead: what a step over several members costs the lead.
#include <cstdio>

#include "absl/strings/string_view.h"
#include "tests/bench/lead/lead_bench.h"
#include "tests/bench/load/load_options.h"
#include "tests/bench/load/load_report.h"
#include "tests/bench/load/load_run.h"

namespace bench = ballast::bench;

namespace {

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "ballast-bench: %s\n", std::string(status.message()).c_str());
  return code;
}

int RunWorker(absl::Span<char* const> arguments) {
  const auto options = bench::ParseLoadOptions(arguments);
  if (!options.ok()) return Fail(options.status(), 2);
  const auto result = bench::RunLoad(*options);
  if (!result.ok()) return Fail(result.status(), 1);
  const bench::Figures figures = bench::FiguresOf(*options, *result);
  std::fputs(bench::TextOf(figures).c_str(), stdout);
  if (options->json_path.empty()) return 0;
  const absl::Status written = figures.Write(options->json_path);
  return written.ok() ? 0 : Fail(written, 1);
}

// A line of JSON for each case.
int RunLead(int steps) {
  // As many tensors as Llama's models of 7, 70 and 405 billion parameters have.
  for (const int parameters : {291, 723, 1137}) {
    for (const int members : {2, 8, 64}) {
      for (const int cut_blocks : {0, parameters}) {
        const auto figures = bench::MeasureLead(
            {.members = members, .parameters = parameters, .cut_blocks = cut_blocks}, steps);
        if (!figures.ok()) return Fail(figures.status(), 1);
        std::printf("%s\n", figures->ToJson().dump().c_str());
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const absl::string_view what = argc < 2 ? "" : argv[1];
  if (what == "lead" && argc == 2) return RunLead(/*steps=*/20);
  if (what != "worker") {
    return Fail(absl::InvalidArgumentError(
                    "expected 'ballast-bench worker [flags]' or 'ballast-bench lead'"),
                2);
  }
  return RunWorker(absl::MakeSpan(argv + 2, static_cast<size_t>(argc - 2)));
}
