#include "client/cli/cli_json.h"

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

using Json = nlohmann::ordered_json;

template <typename Values>
Json Array(const Values& values) {
  Json array = Json::array();
  for (const auto& value : values) array.push_back(value);
  return array;
}

template <typename Values>
Json ArrayOfMessages(const Values& values, Json (*convert)(const typename Values::value_type&)) {
  Json array = Json::array();
  for (const auto& value : values) array.push_back(convert(value));
  return array;
}

Json MemoryToJson(const v1::MemoryUse& memory) {
  return {{"total_bytes", memory.total_bytes()},
          {"state_bytes", memory.state_bytes()},
          {"gradient_bytes", memory.gradient_bytes()},
          {"accumulator_bytes", memory.accumulator_bytes()},
          {"other_bytes", OtherBytes(memory)},
          {"accumulators_in_use", memory.accumulators_in_use()},
          {"speculation_bytes", memory.speculation_bytes()},
          {"previous_bytes", memory.previous_bytes()},
          {"shared_bytes", memory.shared_bytes()}};
}

Json SpeculationToJson(const v1::Speculation& speculation) {
  return {{"unavailable", speculation.unavailable()},
          {"speculated_chunks", speculation.speculated_chunks()},
          {"published_chunks", speculation.published_chunks()},
          {"redone_chunks", speculation.redone_chunks()},
          {"paused_chunks", speculation.paused_chunks()}};
}

Json RankToJson(const v1::RankProgress& rank) {
  return {{"rank", rank.rank()},
          {"attached", rank.attached()},
          {"process_id", rank.process_id()},
          {"attempt", rank.attempt()},
          {"begun", rank.begun()},
          {"micro_steps_ended", rank.micro_steps_ended()},
          {"sealed", rank.sealed()},
          {"voted", rank.voted()},
          {"chunks", rank.chunks()},
          {"chunks_complete", rank.chunks_complete()},
          {"furthest_micro_step", rank.furthest_micro_step()},
          {"missing_parameters", Array(rank.missing_parameters())},
          {"shared_memory", rank.shared_memory()}};
}

Json SaveToJson(const v1::SaveProgress& save) {
  return {{"directory", save.directory()},
          {"step", save.step()},
          {"seconds", save.seconds()},
          {"seconds_since_progress", save.seconds_since_progress()},
          {"written_bytes", save.written_bytes()},
          {"size_bytes", save.size_bytes()},
          {"holds_back_decisions", save.holds_back_decisions()},
          {"makes_memory", save.makes_memory()}};
}

Json ActivityToJson(const v1::Activity& activity) {
  return {{"kind", absl::AsciiStrToLower(v1::ActivityKind_Name(activity.kind()))},
          {"job", activity.job().empty() ? "" : BareName(activity.job())},
          {"directory", activity.directory()},
          {"done_bytes", activity.done_bytes()},
          {"total_bytes", activity.total_bytes()},
          {"seconds", activity.seconds()},
          {"seconds_since_progress", activity.seconds_since_progress()}};
}

Json StepToJson(const v1::StepRecord& step) {
  return {{"step", step.step()},
          {"applied", step.applied()},
          {"skip_reason", step.skip_reason()},
          {"norm", step.norm()},
          {"clip_coefficient", step.clip_coefficient()},
          {"multipliers", Array(step.multipliers())},
          {"voted",
           {{"abandon", step.abandoned()},
            {"max_norm", step.voted().max_norm()},
            {"multipliers", Array(step.voted().multipliers())}}},
          {"micro_steps", step.micro_steps()},
          {"loss_scale", step.loss_scale()},
          {"hyper_parameters", ArrayOfMessages(step.hyper_parameters(), ToJson)},
          {"unused_parameters", Array(step.unused_parameters())},
          {"speculated_chunks", step.speculated_chunks()},
          {"published_chunks", step.published_chunks()},
          {"redone_chunks", step.redone_chunks()},
          {"seconds", step.seconds()}};
}

// The fields that both the list and a single job show.
Json JobHeadToJson(const v1::Job& job) {
  return {{"name", BareName(job.name())},
          {"uid", job.uid()},
          {"resumed_uid", job.resumed_uid()},
          {"ancestors", Array(job.ancestors())},
          {"phase", Name(job.phase())},
          {"problem", job.problem()},
          {"committed_step", job.committed_step()},
          {"generation", ToString(proto::FromProto(job.generation()))},
          {"world_size", job.world_size()},
          {"applied_steps", job.applied_steps()},
          {"skipped_steps", job.skipped_steps()},
          {"memory", MemoryToJson(job.memory())},
          {"activities", ArrayOfMessages(job.activities(), ActivityToJson)}};
}

Json PlaneToJson(const v1::PlaneSummary& plane) {
  Json histogram = Json::array();
  for (int i = 0; i < plane.magnitude_histogram_size(); ++i) {
    histogram.push_back({{"exponent", MagnitudeExponent(static_cast<size_t>(i))},
                         {"count", plane.magnitude_histogram(i)}});
  }
  return {{"plane", Name(plane.plane())},
          {"norm", plane.norm()},
          {"mean", plane.mean()},
          {"min", plane.min()},
          {"max", plane.max()},
          {"zeros", plane.zeros()},
          {"non_finite", plane.non_finite()},
          {"magnitude_histogram", std::move(histogram)}};
}

}  // namespace

Json ToJson(const v1::HyperParameters& values) {
  return {{"lr", values.lr()},
          {"beta1", values.beta1()},
          {"beta2", values.beta2()},
          {"eps", values.eps()},
          {"weight_decay", values.weight_decay()},
          {"decoupled_weight_decay", values.decoupled_weight_decay()},
          {"bias_correction", values.bias_correction()},
          {"amsgrad", values.amsgrad()},
          {"maximize", values.maximize()}};
}

Json ToJson(const v1::ListJobsResponse& response) {
  return {{"instance_id", response.instance_id()},
          {"memory_used_bytes", response.memory_used_bytes()},
          {"memory_limit_bytes", response.memory_limit_bytes()},
          {"activities", ArrayOfMessages(response.activities(), ActivityToJson)},
          {"jobs", ArrayOfMessages(response.jobs(), JobHeadToJson)}};
}

Json ToJson(const v1::Job& job) {
  Json json = JobHeadToJson(job);
  json["instance_id"] = job.instance_id();
  json["on_abort"] = job.on_abort() == v1::SKIP_STEP ? "skip" : "redo";
  json["keep_previous"] = job.keep_previous();
  json["undoable_step"] = job.undoable_step();
  json["unused_policy"] = Name(job.unused_policy());
  json["max_micro_steps"] = job.max_micro_steps();
  json["chunk_elements"] = job.chunk_elements();
  json["update_mode"] = Name(job.update_mode());
  json["speculation"] = SpeculationToJson(job.speculation());
  json["coverage_complete_steps"] = job.coverage_complete_steps();
  json["not_kept_steps"] = job.not_kept_steps();
  json["ranks"] = ArrayOfMessages(job.ranks(), RankToJson);
  json["recent_steps"] = ArrayOfMessages(job.recent_steps(), StepToJson);
  json["saves"] = ArrayOfMessages(job.saves(), SaveToJson);
  return json;
}

Json ToJson(const v1::ParamGroup& group) {
  return {{"name", BareName(group.name())},
          {"hyper_parameters", ToJson(group.hyper_parameters())},
          {"wire_dtype", Name(group.wire_dtype())},
          {"return_dtype", Name(group.return_dtype())},
          {"parameter_count", group.parameter_count()},
          {"trainable_elements", group.trainable_elements()},
          {"flat_elements", group.flat_elements()}};
}

Json GroupsToJson(const v1::Job& job) {
  return {{"job", BareName(job.name())}, {"groups", ArrayOfMessages(job.groups(), ToJson)}};
}

Json ToJson(const v1::StateSummary& summary) {
  return {{"parameter", BareName(summary.name())},
          {"step", summary.step()},
          {"shape", Array(summary.shape())},
          {"group", BareName(summary.group())},
          {"trainable", summary.trainable()},
          {"update_count", summary.update_count()},
          {"planes", ArrayOfMessages(summary.planes(), PlaneToJson)}};
}

int64_t OtherBytes(const v1::MemoryUse& memory) {
  // shared_bytes are beside the total, and so are not subtracted.
  return memory.total_bytes() - memory.state_bytes() - memory.gradient_bytes() -
         memory.accumulator_bytes() - memory.speculation_bytes() - memory.previous_bytes();
}

std::string Dump(const Json& json) {
  // dump writes null for numbers that are not finite: JSON has no word for them.
  return json.dump(2, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + "\n";
}

std::string Name(v1::JobPhase phase) { return absl::AsciiStrToLower(v1::JobPhase_Name(phase)); }
std::string Name(v1::DType dtype) { return absl::AsciiStrToLower(v1::DType_Name(dtype)); }
std::string Name(v1::UnusedPolicy policy) {
  return absl::AsciiStrToLower(v1::UnusedPolicy_Name(policy));
}
std::string Name(v1::UpdateMode mode) {
  // A mode that is not set means WAIT.
  return mode == v1::SPECULATE ? "speculate" : "wait";
}
std::string Name(v1::Plane plane) { return absl::AsciiStrToLower(v1::Plane_Name(plane)); }

}  // namespace ballast::client::cli
