#include "cpu_optimizer_service/common/system/chrome_trace_writer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace ballast {
namespace {

using nlohmann::json;

TEST(ChromeTraceWriter, WritesOneDocument) {
  const ChromeTraceWriter writer(7, "a process");
  const json trace = json::parse(
      writer.Head() + writer.Track(3, "steps", 1) +
      writer.Slice(3, {.name = "step 5",
                       .category = "step",
                       .begin_us = 10.5,
                       .duration_us = 2,
                       .arguments = {{"step", 5}}}) +
      writer.Instant(
          3, {.name = "begun", .category = "begun", .begin_us = 10, .arguments = {{"step", 5}}}) +
      ChromeTraceWriter::Tail({{"dropped", 0}}));
  const json head = {
      {"name", "process_name"}, {"ph", "M"}, {"pid", 7}, {"args", {{"name", "a process"}}}};
  const json name = {
      {"name", "thread_name"}, {"ph", "M"}, {"pid", 7}, {"tid", 3}, {"args", {{"name", "steps"}}}};
  const json sort_index = {{"name", "thread_sort_index"},
                           {"ph", "M"},
                           {"pid", 7},
                           {"tid", 3},
                           {"args", {{"sort_index", 1}}}};
  const json slice = {{"name", "step 5"}, {"cat", "step"}, {"ph", "X"}, {"pid", 7},
                      {"tid", 3},         {"ts", 10.5},    {"dur", 2},  {"args", {{"step", 5}}}};
  const json instant = {{"name", "begun"}, {"cat", "begun"}, {"ph", "i"}, {"pid", 7},
                        {"tid", 3},        {"ts", 10},       {"s", "p"},  {"args", {{"step", 5}}}};
  EXPECT_EQ(trace, json({{"displayTimeUnit", "ms"},
                         {"traceEvents", {head, name, sort_index, slice, instant}},
                         {"otherData", {{"dropped", 0}}}}));
}

TEST(ChromeTraceWriter, ReplacesBytesThatAreNotText) {
  const ChromeTraceWriter writer(1, "\xff\"\n");
  EXPECT_TRUE(json::accept(writer.Head() + ChromeTraceWriter::Tail({{"name", "\xfe"}})));
}

}  // namespace
}  // namespace ballast
