//! Line charts that name every curve at its end, without a legend and without a grid.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// Size of the image, in pixels.
const WIDTH: i32 = 900;
const HEIGHT: i32 = 540;
/// Font sizes. plotters divides them by 1.24: the SVG has 14.5 and 16 pixels, readable in an image
/// that is shown 800 pixels wide.
const FONT: u32 = 18;
const TITLE_FONT: u32 = 20;
/// Average width of a character of [`FONT`], in pixels: in DejaVu Sans, a wide one of the fonts
/// that a viewer may choose.
const CHARACTER_WIDTH: f64 = 8.4;
/// Least distance between two labels.
const LABEL_HEIGHT: i32 = 20;
/// Space between the horizontal axis and the labels, for the lines that lead to them.
const LEADER_WIDTH: i32 = 36;
/// The vertical axis, and the ends of it.
const LEFT: i32 = 64;
const TOP: i32 = 76;
const BOTTOM: i32 = HEIGHT - 60;

/// Colours of Okabe and Ito, which colour-blind readers can tell apart. Their yellow is left out,
/// since it is too pale on white.
pub const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];

/// A chart of curves.
pub struct Chart {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub curves: Vec<Curve>,
}

/// A linear axis.
pub struct Axis {
    pub name: &'static str,
    pub range: Range<f64>,
    /// Values and the text at each.
    pub ticks: Vec<(f64, String)>,
}

/// A curve and its label.
pub struct Curve {
    pub name: String,
    /// In the order of `x`. No `x` lies outside its axis, and no `y` below its axis.
    pub points: Vec<(f64, f64)>,
    pub color: RGBColor,
    /// Lengths of dashes and gaps in pixels; `None` for a solid curve.
    pub dash: Option<[i32; 2]>,
}

impl Chart {
    /// Writes the chart into an SVG file.
    pub fn draw(&self, path: &Path) -> Drawn {
        let area = SVGBackend::new(path, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        text(&area, TITLE_FONT, &self.title, (16, 26), HPos::Left)?;
        self.draw_axes(&area)?;
        let curves: Vec<Vec<(i32, i32)>> =
            self.curves.iter().map(|curve| self.pixels(curve)).collect();
        for (curve, pixels) in self.curves.iter().zip(&curves) {
            let style = curve.color.stroke_width(2);
            match curve.dash {
                None => area.draw(&PathElement::new(pixels.clone(), style))?,
                Some([dash, gap]) => {
                    area.draw(&DashedPathElement::new(pixels.clone(), dash, gap, style))?;
                }
            }
        }
        self.draw_labels(&area, &curves)?;
        area.present()?;
        Ok(())
    }

    /// The right end of the horizontal axis, which leaves room for the longest label.
    fn right(&self) -> i32 {
        let characters = self.curves.iter().map(|curve| curve.name.chars().count()).max();
        let width = CHARACTER_WIDTH * characters.unwrap_or(0) as f64;
        WIDTH - LEADER_WIDTH - width.ceil() as i32
    }

    /// The part of a curve below the upper end of the axis, in pixels. A curve that comes from
    /// above enters where it crosses that end.
    fn pixels(&self, curve: &Curve) -> Vec<(i32, i32)> {
        let top = self.y.range.end;
        let above = curve.points.iter().rposition(|(_, y)| *y > top);
        let mut visible = curve.points[above.map_or(0, |above| above + 1)..].to_vec();
        if let (Some(above), Some(&(x, y))) = (above, visible.first()) {
            let (x_above, y_above) = curve.points[above];
            let share = (y_above - top) / (y_above - y);
            visible.insert(0, (x_above + share * (x - x_above), top));
        }
        let right = self.right();
        let pixel = |(x, y)| (self.x.pixel(x, LEFT, right), self.y.pixel(y, BOTTOM, TOP));
        visible.into_iter().map(pixel).collect()
    }

    fn draw_axes(&self, area: &Area) -> Drawn {
        let right = self.right();
        let line = |points: Vec<(i32, i32)>| area.draw(&PathElement::new(points, BLACK));
        line(vec![(LEFT, TOP), (LEFT, BOTTOM), (right, BOTTOM)])?;
        for (value, label) in &self.x.ticks {
            let x = self.x.pixel(*value, LEFT, right);
            line(vec![(x, BOTTOM), (x, BOTTOM + 6)])?;
            text(area, FONT, label, (x, BOTTOM + 18), HPos::Center)?;
        }
        for (value, label) in &self.y.ticks {
            let y = self.y.pixel(*value, BOTTOM, TOP);
            line(vec![(LEFT - 6, y), (LEFT, y)])?;
            text(area, FONT, label, (LEFT - 12, y), HPos::Right)?;
        }
        text(area, FONT, self.x.name, ((LEFT + right) / 2, BOTTOM + 42), HPos::Center)?;
        text(area, FONT, self.y.name, (16, TOP - 22), HPos::Left)
    }

    /// Writes the names of the curves at their ends, with a thin line from each end to its name.
    fn draw_labels(&self, area: &Area, curves: &[Vec<(i32, i32)>]) -> Drawn {
        let right = self.right();
        // The label of a curve without points is placed at the top.
        let ends = curves.iter().map(|pixels| pixels.last().map_or(TOP, |(_, y)| *y));
        let heights = push_apart(ends.collect());
        for ((curve, pixels), height) in self.curves.iter().zip(curves).zip(heights) {
            if let Some(end) = pixels.last() {
                let leader = vec![*end, (right + LEADER_WIDTH - 8, height)];
                area.draw(&PathElement::new(leader, curve.color))?;
            }
            text(area, FONT, &curve.name, (right + LEADER_WIDTH, height), HPos::Left)?;
        }
        Ok(())
    }
}

impl Axis {
    /// The pixel of a value, on an axis that goes from one pixel to another.
    fn pixel(&self, value: f64, start: i32, end: i32) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        start + (share * f64::from(end - start)).round() as i32
    }
}

/// Draws a text whose middle line is at the height of `position`.
fn text(area: &Area, size: u32, text: &str, position: (i32, i32), anchor: HPos) -> Drawn {
    let style = ("sans-serif", size).into_text_style(area);
    let style = style.pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(text, position, style))?;
    Ok(())
}

/// Moves labels apart that would cover each other, and keeps their order. `heights` grow downwards,
/// and none becomes larger than [`BOTTOM`].
fn push_apart(mut heights: Vec<i32>) -> Vec<i32> {
    let mut order: Vec<usize> = (0..heights.len()).collect();
    order.sort_by_key(|label| heights[*label]);
    for pair in order.windows(2) {
        heights[pair[1]] = heights[pair[1]].max(heights[pair[0]] + LABEL_HEIGHT);
    }
    // The last labels may now be too low: they move up again, and push those above them.
    let mut limit = BOTTOM;
    for label in order.into_iter().rev() {
        heights[label] = heights[label].min(limit);
        limit = heights[label] - LABEL_HEIGHT;
    }
    heights
}
