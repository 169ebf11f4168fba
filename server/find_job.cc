#include "server/find_job.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::server {

absl::StatusOr<std::shared_ptr<Job>> FindJob(const Engine& engine, const Caller& caller,
                                             const std::string& name) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseJobName(name));
  BALLAST_RETURN_IF_ERROR(caller.Check(parsed.job));
  return engine.FindJob(parsed.job);
}

absl::StatusOr<std::shared_ptr<Job>> FindJob(const Engine& engine, const Caller& caller,
                                             const std::string& name, const std::string& uid) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseJobName(name));
  BALLAST_RETURN_IF_ERROR(caller.Check(parsed.job));
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job, engine.FindJob(parsed.job, uid));
  if (uid.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("no uid of ", name,
                     "; give the one that attaching returned, so that no other job is meant"));
  }
  return job;
}

absl::StatusOr<std::shared_ptr<Job>> FindDerived(const Engine& engine, const Caller& caller,
                                                 const std::string& name,
                                                 const std::string& from_uid) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseJobName(name));
  BALLAST_RETURN_IF_ERROR(caller.Check(parsed.job));
  return engine.FindDerived(parsed.job, from_uid);
}

std::function<bool()> IsGone(const Engine& engine, const Caller& caller, const Job& job) {
  return [&engine, revoked = caller.IsRevoked(job.spec().name), name = job.spec().name,
          uid = job.uid()] {
    if (revoked()) return true;
    const absl::StatusOr<std::shared_ptr<Job>> found = engine.FindJob(name, uid);
    // It stays for the process that takes this one's place.
    if (ReasonOf(found.status()) == reason::kRestarting) return false;
    // Not found, or UNAVAILABLE because another job of this name is being created: either way this
    // one is closed.
    return !found.ok();
  };
}

std::vector<ElementRange> ElementsHere(const Job& job, int parameter) {
  const Layout& layout = job.layout();
  const int64_t elements = layout.place(parameter).elements;
  if (job.spec().member_count() == 1) return {{0, elements}};
  std::vector<ElementRange> ranges;
  for (const int chunk : layout.ChunksOfParameter(parameter)) {
    layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      if (piece.parameter != parameter) return;
      ranges.push_back({piece.parameter_offset, piece.parameter_offset + piece.elements});
    });
  }
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  std::vector<ElementRange> joined;
  for (const ElementRange& range : ranges) {
    if (!joined.empty() && joined.back().end == range.begin) {
      joined.back().end = range.end;
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

absl::Status CheckIsHere(const Job& job, int parameter) {
  if (job.spec().member_count() == 1) return absl::OkStatus();
  const int64_t elements = job.layout().place(parameter).elements;
  const std::vector<ElementRange> here = ElementsHere(job, parameter);
  const bool is_whole = here.size() == 1 && here[0].end - here[0].begin == elements;
  if (is_whole || elements == 0 || !job.spec().layout.parameters[parameter].trainable) {
    return absl::OkStatus();
  }
  return WithReason(
      absl::UnimplementedError(absl::StrCat(
          "other members of job ", job.spec().name, " have parts of ",
          job.spec().layout.parameters[parameter].name, "; read them from each member")),
      reason::kOtherMembersHaveParts);
}

absl::StatusOr<FoundParameter> FindParameter(const Engine& engine, const Caller& caller,
                                             const std::string& name, const std::string& uid) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName parsed, proto::ParseParameterName(name));
  BALLAST_RETURN_IF_ERROR(caller.Check(parsed.job));
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<Job> job, engine.FindJob(parsed.job, uid));
  const int index = job->layout().FindParameter(parsed.child);
  if (index < 0) {
    return absl::NotFoundError(
        absl::StrCat("job ", parsed.job, " has no parameter '", parsed.child,
                     "'; GetJob, with with_parameters set, names those that it has"));
  }
  return FoundParameter{.job = std::move(job), .index = index};
}

}  // namespace ballast::server
