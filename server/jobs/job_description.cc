#include "server/jobs/job_description.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

struct DescriptionSize {
  int64_t bytes = 0;
  int64_t groups = 0;
  int64_t parameters = 0;
  int64_t partitions = 0;
  int64_t mesh_dims = 0;
  std::string name;  // The request's own field 1, where that is a string.
};

constexpr int kCreateJobField = v1::CreateJobRequest::kJobFieldNumber;
constexpr int kAttachJobField = v1::AttachWorkerRequest::kJobFieldNumber;
constexpr int kNameField = v1::AttachWorkerRequest::kNameFieldNumber;

bool MeasureJob(CodedInputStream& in, DescriptionSize& size) {
  uint32_t bytes = 0;
  if (!in.ReadVarint32(&bytes)) return false;
  if (static_cast<int32_t>(bytes) < 0) return false;
  size.bytes += bytes;
  const CodedInputStream::Limit outer = in.PushLimit(static_cast<int>(bytes));
  while (const uint32_t tag = in.ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    size.groups += field == v1::Job::kGroupsFieldNumber ? 1 : 0;
    size.parameters += field == v1::Job::kParametersFieldNumber ? 1 : 0;
    size.partitions += field == v1::Job::kPartitionsFieldNumber ? 1 : 0;
    size.mesh_dims += field == v1::Job::kMeshFieldNumber ? 1 : 0;
    if (!WireFormatLite::SkipField(&in, tag)) return false;
  }
  if (!in.ConsumedEntireMessage()) return false;
  in.PopLimit(outer);
  return true;
}

bool Measure(const grpc::ByteBuffer& bytes, int job_field, DescriptionSize& size) {
  grpc::ByteBuffer reader_of = bytes;  // Another reference to the same bytes.
  grpc::ProtoBufferReader reader(&reader_of);
  if (!reader.status().ok()) return false;
  CodedInputStream in(&reader);
  in.SetTotalBytesLimit(std::numeric_limits<int>::max());
  while (const uint32_t tag = in.ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    const bool is_bytes =
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (is_bytes && field == job_field) {
      if (!MeasureJob(in, size)) return false;
    } else if (is_bytes && field == kNameField) {
      uint32_t length = 0;
      if (!in.ReadVarint32(&length) || static_cast<int32_t>(length) < 0) return false;
      if (!in.ReadString(&size.name, static_cast<int>(length))) return false;
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return false;
    }
  }
  return in.ConsumedEntireMessage();
}

absl::Status NotA(absl::string_view message) {
  return WithReason(absl::InvalidArgumentError(absl::StrCat("the request is not a ballast.v1.",
                                                            message,
                                                            "; send one as in ballast.proto")),
                    reason::kMalformedMessage);
}

absl::Status TooMany(absl::string_view what, int64_t count, int64_t most) {
  return absl::InvalidArgumentError(absl::StrCat("the description has ", count, " ", what, ", of ",
                                                 most, " at most; make several jobs"));
}

// As message, as JobSpec and in the job's tables; generous.
int64_t MostBytesToRead(const DescriptionSize& size) {
  constexpr int64_t kBytesOfByte = 24;  // A dimension of one byte becomes eight, three times.
  return kBytesOfByte * size.bytes + 1024 * (size.parameters + size.groups) + 256 * size.partitions;
}

// Ranges that another split of the same parameters might have.
int64_t MostRangesDescribing(const Job& job) {
  return 4096 + 4 * static_cast<int64_t>(job.layout().chunks().size());
}

// As bytes of a message; generous.
int64_t MostBytesDescribing(const Job& job) {
  const JobSpec& spec = job.spec();
  // Names may stand there in full.
  constexpr int64_t kFullName = 200;
  int64_t bytes = 4096;
  for (const GroupSpec& group : spec.groups) {
    bytes += kFullName + 256 + static_cast<int64_t>(group.name.size());
  }
  for (const ParameterSpec& parameter : spec.layout.parameters) {
    bytes += kFullName + 64 + static_cast<int64_t>(parameter.name.size()) +
             11 * static_cast<int64_t>(parameter.shape.size()) +
             5 * static_cast<int64_t>(parameter.placements.size());
  }
  for (const MeshDim& dim : spec.layout.mesh) {
    bytes += kFullName + 64 + static_cast<int64_t>(dim.name.size());
  }
  return bytes + 64 * MostRangesDescribing(job);
}

}  // namespace

absl::StatusOr<MemoryBudget::Reservation> RoomToRead(Engine& engine,
                                                     const grpc::ByteBuffer& create_request) {
  DescriptionSize size;
  if (!Measure(create_request, kCreateJobField, size)) return NotA("CreateJobRequest");
  if (size.parameters > kMaxParameters) {
    return TooMany("parameters", size.parameters, kMaxParameters);
  }
  if (size.groups > kMaxGroups) return TooMany("groups", size.groups, kMaxGroups);
  if (size.partitions > kMaxChunks) return TooMany("partitions", size.partitions, kMaxChunks);
  if (size.mesh_dims > static_cast<int64_t>(kMaxDimensions)) {
    return absl::InvalidArgumentError(absl::StrCat("the mesh has ", size.mesh_dims,
                                                   " dimensions, of ", kMaxDimensions, " at most"));
  }
  const int64_t bytes = MostBytesToRead(size);
  if (bytes <= kSmallDescriptionBytes) return MemoryBudget::Reservation();
  return engine.Reserve(bytes, "reading the description of a job");
}

absl::StatusOr<std::string> NameOfJobToAttach(const grpc::ByteBuffer& attach_request) {
  DescriptionSize size;
  if (!Measure(attach_request, kAttachJobField, size)) return NotA("AttachWorkerRequest");
  return size.name;
}

absl::Status CheckAsLargeAs(const Job& job, const grpc::ByteBuffer& attach_request) {
  DescriptionSize size;
  if (!Measure(attach_request, kAttachJobField, size)) return NotA("AttachWorkerRequest");
  const auto check = [&](absl::string_view what, int64_t there, int64_t here) {
    if (there <= here) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "a worker describes job ", job.spec().name, " otherwise: the number of ", what, " is ",
        here, " here and ", there,
        " there (here: the service's job); close the job or train with the same description"));
  };
  const Layout& layout = job.layout();
  BALLAST_RETURN_IF_ERROR(check("groups", size.groups, layout.group_count()));
  BALLAST_RETURN_IF_ERROR(
      check("parameters", size.parameters, static_cast<int64_t>(layout.spec().parameters.size())));
  BALLAST_RETURN_IF_ERROR(
      check("partition ranges, at most,", size.partitions, MostRangesDescribing(job)));
  return check("bytes, at most,", size.bytes, MostBytesDescribing(job));
}

}  // namespace ballast::server
