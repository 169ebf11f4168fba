// Any bytes as the Job of a create request, up to the moment at which memory would be taken.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/job/job.h"
#include "proto/convert.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace ballast {
namespace {

void Demand(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::string SeedInput(bool with_mesh) {
  JobSpec spec;
  spec.name = "a";
  spec.groups = {{.name = "g", .hyper_parameters = {}}, {.name = "h", .hyper_parameters = {}}};
  spec.layout.world_size = 2;
  spec.layout.group_count = 2;
  spec.layout.parameters = {{.name = "w", .shape = {30, 10}, .group = 0},
                            {.name = "b", .shape = {}, .group = 1}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256},
                            {.rank = 1, .group = 0, .begin = 256, .end = 512},
                            {.rank = 1, .group = 1, .begin = 0, .end = 256}};
  spec.layout.chunk_elements = 256;
  if (with_mesh) {
    spec.layout.partitions.clear();
    spec.layout.mesh = {{"dp", 1}, {"tp", 2}};
    spec.layout.parameters[0].placements = {{.shard_dim = 0}, {.shard_dim = 1}};
    spec.layout.parameters[1].placements = {{}, {}};
  }
  return proto::ToProto(spec).SerializeAsString();
}

void CheckInput(const uint8_t* data, size_t size) {
  v1::Job message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return;
  const absl::StatusOr<JobSpec> spec = proto::FromProto(message);
  if (!spec.ok() || !Validate(*spec).ok()) return;
  const absl::StatusOr<Layout> layout = Layout::Create(spec->layout);
  if (!layout.ok()) return;

  const MemoryNeed need = NeedOf(*spec, *layout);
  Demand(need.state_bytes >= 2 * layout->total_elements(), "too little state");
  Demand(need.total_bytes() >= need.state_bytes, "the sum overflows");
  int64_t elements = 0;
  for (const Chunk& chunk : layout->chunks()) {
    Demand(chunk.elements > 0 && chunk.elements <= kMaxChunkElements, "a chunk's size");
    Demand(chunk.rank >= 0 && chunk.rank < layout->world_size(), "a chunk's rank");
    elements += chunk.elements;
  }
  Demand(elements == layout->total_elements(), "chunks do not tile the flat spaces");
  const absl::StatusOr<JobSpec> again = proto::FromProto(proto::ToProto(*spec));
  Demand(again.ok() && FirstDifference(*spec, *again).empty(), "another job after a round trip");
}

}  // namespace
}  // namespace ballast

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Otherwise protobuf writes a line for each string that is not UTF-8.
  static const auto kPreviousLogHandler = google::protobuf::SetLogHandler(nullptr);
  static_cast<void>(kPreviousLogHandler);
  ballast::CheckInput(data, size);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  if (size < 2) {
    const std::string input = ballast::SeedInput(/*with_mesh=*/seed % 2 == 0);
    size = std::min(input.size(), max_size);
    std::copy_n(input.begin(), size, data);
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
